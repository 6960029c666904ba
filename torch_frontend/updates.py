"""Updates of tensors, carried out by a backend: what an optimizer does to parameters that have a gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import compensation as compensations
from ..core.hyperparameters import Hyperparameters
from ..core.release import Action
from ..core.rules import Rule
from . import state as saved_state
from .array_ops import dtype_name
from .backends import Backend, ChecksOnDevice, TensorSlot
from .communication.shards import LocalState, is_sharded, local, means_over_shards
from .finiteness import SkipCount
from .groups import Group, check_device, fingerprint, hyperparameters


class TensorUpdates(Optimizer):
    """The part of an optimizer that updates tensors, whoever asks: `step()`, or the hooks of gradient release.

    The unit of work is one action of the release state machine on one parameter.
    """

    rule: ClassVar[Rule]
    on_nonfinite: str
    _backend: Backend
    _skipped: SkipCount
    _group_map: dict[Tensor, Group]
    _places: dict[Tensor, tuple[int, int]]  # the numbers of the group and in it
    _validated: dict[int, tuple[tuple[Any, ...], Hyperparameters]]

    def _forget_groups(self) -> None:
        """The groups may be other ones now."""
        self._group_map, self._places, self._validated = {}, {}, {}

    @property
    def launches_together(self) -> bool:
        """Whether the backend updates many small tensors at the cost of one."""
        return self._backend.one_launch

    @property
    def skipped(self) -> int:
        """Steps, or under release gradients, that were not used because they held an infinity or a NaN.

        Reading it waits for the device where only that knows: backend="triton" with capturable=True.
        """
        return self._skipped.total

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped.reset(count)

    def count_skipped(self, count: int = 1) -> None:
        """So many more; nobody waits for the device."""
        self._skipped.add(count)

    def group_of(self, parameter: Tensor) -> Group:
        """The live group of a parameter: load_state_dict replaces the group dicts, so none is ever kept."""
        return self._groups([parameter])[parameter]

    def holds(self, parameter: Tensor) -> bool:
        """Whether the parameter is in a group."""
        return parameter in self._groups([parameter])

    def _groups(self, parameters: Iterable[Tensor]) -> dict[Tensor, Group]:
        """Where each of the parameters is. Groups and their lists may be others at any time, or hold others."""
        if not all(map(self._is_in_place, parameters)):
            self._group_map, self._places = {}, {}
            for number, group in enumerate(self.param_groups):
                self._group_map |= dict.fromkeys(group["params"], group)
                self._places |= {parameter: (number, position) for position, parameter in enumerate(group["params"])}
        return self._group_map

    def _is_in_place(self, parameter: Tensor) -> bool:
        """Whether it is where it was found last. One look, however many groups there are: every gradient asks."""
        number, position = self._places.get(parameter, (len(self.param_groups), 0))
        if number >= len(self.param_groups):
            return False
        group = self.param_groups[number]
        members = group["params"]
        return group is self._group_map[parameter] and position < len(members) and members[position] is parameter

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- actions ---------------------------------------------------------------------------------------------------------

    def checks_on_device(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the device itself leaves out what is to be skipped, so that nobody has to wait for it."""
        checks = self.on_nonfinite == "skip" and isinstance(self._backend, ChecksOnDevice)
        return checks and all(group["capturable"] for group in self.param_groups) and not any(map(is_sharded, parameters))

    def perform_all(
        self, tasks: Sequence[tuple[Tensor, Tensor | None, Action]], *, if_finite: bool = False
    ) -> Sequence[Tensor]:
        """Actions on parameters; what they need from other processes comes in one exchange for all of them.

        Args:
            tasks: parameter, gradient, action. The parameter is of this optimizer; the gradient of its shape, or None for
                `Action.APPLY`, and is left as it is; the action is one of those that use the gradient or step.
            if_finite: every action is `Action.UPDATE`, and those whose gradient is not finite are left out, where
                `checks_on_device` of all parameters holds.

        Returns:
            With if_finite, of each task: 1 where it was done, 0 where it was left out, 0-d on the device.
        """
        updates: list[tuple[TensorSlot, Tensor]] = []
        updated: list[Tensor] = []
        shards: list[tuple[Tensor, TensorSlot]] = []
        steps: list[Tensor] = []
        clips = self.rule.clips_update
        slots = self._slots([parameter for parameter, _, _ in tasks])
        for (parameter, gradient, action), slot in zip(tasks, slots, strict=True):
            here = local(gradient)
            update = action is Action.UPDATE
            if update or action.steps:
                steps.append(slot.state["step"])
            if update:
                updates.append((slot, here))
                updated.append(parameter)
            elif clips and action.steps and is_sharded(parameter):
                if action is not Action.APPLY:
                    self._backend.accumulate(slot, here, first=False)
                shards.append((parameter, slot))
            elif action is Action.APPLY:
                self._backend.apply(slot)
            else:
                (self._backend.update if action.steps else self._backend.accumulate)(slot, here, first=action.first)
        applied: Sequence[Tensor] = ()
        if if_finite:
            assert isinstance(self._backend, ChecksOnDevice)
            applied = self._backend.update_each_if_finite(updates)
        elif clips and any(map(is_sharded, updated)):
            self._backend.update_all(updates, over_shards=functools.partial(means_over_shards, updated))
        elif len(updates) == 1:
            self._backend.update(*updates[0], first=True)
        elif updates:
            self._backend.update_all(updates)
        self._apply_shards(shards)
        _advance(steps, applied)
        self._skipped.add_unapplied(applied)
        return applied

    def perform(self, parameter: Tensor, gradient: Tensor | None, action: Action) -> None:
        """`perform_all` of one."""
        self.perform_all([(parameter, gradient, action)])

    def update_if_all_finite(self, ready: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        """Update all or, where a gradient is not finite, none: the device decides, where `checks_on_device` holds.

        Args:
            ready: parameter and gradient.

        Returns:
            Nothing of nothing; else one number, 1 where it was done, 0 where it was left out, 0-d on a device.
        """
        assert isinstance(self._backend, ChecksOnDevice)
        slots = self._slots([parameter for parameter, _ in ready])
        pairs = [(slot, gradient) for slot, (_, gradient) in zip(slots, ready, strict=True)]
        if not pairs:
            return ()
        applied = self._backend.update_all_if_finite(pairs)
        _advance([slot.state["step"] for slot, _ in pairs], [applied] * len(pairs))
        self._skipped.add_unapplied([applied])
        return [applied]

    def _apply_shards(self, shards: Sequence[tuple[Tensor, TensorSlot]]) -> None:
        """The step of tensors whose clip factor depends on shards elsewhere: sums of squares travel, in one exchange."""
        squares = [slot.state["mean_square"] for _, slot in shards]
        for (_, slot), square in zip(shards, means_over_shards([parameter for parameter, _ in shards], squares), strict=True):
            slot.state["mean_square"] = square
            self._backend.apply(slot)

    # -- what a backend gets ---------------------------------------------------------------------------------------------

    def _hyperparameters(self, group: Group) -> Hyperparameters:
        """Those of the group as it is now; validated again only when a setting has changed."""
        now = fingerprint(group)
        known = self._validated.get(id(group))
        if known is None or known[0] != now:
            known = self._validated[id(group)] = (now, hyperparameters(group))
        return known[1]

    def _slot(self, parameter: Tensor) -> TensorSlot:
        """What an update of the parameter reads and writes."""
        return self._slots([parameter])[0]

    def _slots(self, parameters: Sequence[Tensor]) -> list[TensorSlot]:
        """Those of many, where a group is looked at once."""
        groups, slots = self._groups(parameters), []
        known: dict[tuple[int, torch.dtype, torch.device], tuple[Hyperparameters, str, bool, str | None]] = {}
        for parameter in parameters:
            group = groups[parameter]
            alike = id(group), parameter.dtype, parameter.device
            if alike not in known:
                name = dtype_name(parameter.dtype)
                compensation = compensations.resolve(group["compensation"], name)
                current = self._hyperparameters(group)
                check_device(current, parameter)
                kept = compensations.compensation_dtype(compensation, name)
                known[alike] = (current, compensation, group["capturable"], kept)
            current, compensation, capturable, kept = known[alike]
            state = self.state[parameter]
            if not state:
                state.update(saved_state.initial_state(group, parameter, current))
            saved_state.check_fits(state, parameter, kept)
            part = local(parameter)
            here = state if part is parameter else LocalState(state)
            slots.append(TensorSlot(part, here, compensation, self.rule, current, capturable))
        return slots


def _advance(steps: Sequence[Tensor], applied: Sequence[Tensor] = ()) -> None:
    """Count an update of each tensor: by one, or by its number of `applied`, which is 0 where the device skipped it."""
    by_device: dict[torch.device, list[int]] = {}
    for position, step in enumerate(steps):
        by_device.setdefault(step.device, []).append(position)
    for device, here in by_device.items():
        # As a list of tensors: a number would be made a tensor for each of them on a CPU, and one tensor be waited for.
        if applied:
            amounts = [applied[i].to(device, non_blocking=True) for i in here]
        else:
            amounts = [torch.ones((), device=device)] * len(here)
        counts = [steps[i] for i in here]
        torch._foreach_add_(counts, amounts)  # pyright: ignore[reportPrivateImportUsage]  (documented: Foreach Operations)
