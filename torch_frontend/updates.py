"""Updates of an optimizer's parameters, which a backend carries out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import codings, random_bits
from ..core import compensation as compensations
from ..core.errors import RefusedError
from ..core.release import Action
from ..core.rules import Rule
from . import state as saved_state
from .array_ops import dtype_name
from .backends import Backend, ChecksOnDevice, TensorSlot, count_updates, select_backend
from .backends.numbers import GroupSettings
from .changing_betas import check_between_updates
from .checks import check_complete, check_device, check_gradient, check_shape
from .communication.shards import LocalState, is_released, is_sharded, local, means_over_shards, shard_of
from .finiteness import SkipCount
from .groups import first_index, hyperparameters, rule_of
from .known_group import KnownGroup


class TensorUpdates(Optimizer):
    """The part of an optimizer that updates tensors, for `step()` and for the hooks of gradient release.

    The unit of work is one `Action` of the release state machine on one parameter.
    """

    rule: ClassVar[Rule]
    _backend: Backend
    _rules: Set[Rule] = frozenset()  # that the backend was chosen for
    _skipped: SkipCount
    _slots: dict[int, TensorSlot]  # by the id of the parameter, in the groups' order
    _groups: list[KnownGroup]
    _clips = False  # whether the rule of a group clips its updates
    _whole: dict[int, Tensor]  # the parameters by id; keeping them alive keeps their ids valid

    def _check_kernels(self) -> None:
        """Raise `RefusedError` if the backend, once it is chosen, has no kernels for the rule of a group."""
        others = set(map(rule_of, self.param_groups)) - self._rules
        if others and hasattr(self, "_backend") and self._backend.name == "triton":
            select_backend("triton", (), others)

    def _check_rows(self, parameters: Iterable[Tensor]) -> None:
        """Raise `RefusedError` if the backend, once it is chosen, cannot follow the rows of these parameters."""
        if hasattr(self, "_backend") and self._backend.name == "triton":
            select_backend("triton", (), (), parameters)

    def _forget_groups(self) -> None:
        """Drop what is cached of the groups."""
        self._slots, self._groups, self._whole = {}, [], {}

    @property
    def _launches_together(self) -> bool:
        """Whether the backend updates many small tensors in one launch."""
        return self._backend.one_launch

    @property
    def on_nonfinite(self) -> str:
        """What is done with a gradient that contains an infinity or a NaN."""
        raise NotImplementedError

    @property
    def skipped(self) -> int:
        """Number of steps, or under release of gradients, that were skipped because of an infinity or a NaN.

        Reading it synchronises if the device counts them: backend="triton" with capturable=True.
        """
        return self._skipped.total

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped.reset(count)

    def _count_skipped(self, count: int = 1) -> None:
        """Add to the number of skipped steps, without a synchronisation."""
        self._skipped.add(count)

    def _holds(self, parameter: Tensor) -> bool:
        """Whether the parameter is in a group, as of the last `_refresh`."""
        return id(parameter) in self._whole

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _check_usable(self, parameter: Tensor, gradient: Tensor) -> None:
        """Raise if step() cannot use a gradient: it is sparse or complex, or another optimizer's release has used it."""
        if is_released(gradient):
            raise RefusedError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was used and freed by another optimizer's "
                "release. Give each parameter to one optimizer, or call remove() on that release."
            )
        check_gradient(parameter, gradient)

    # -- actions ---------------------------------------------------------------------------------------------------------

    @property
    def _may_check_on_device(self) -> bool:
        """Whether gradients are to be skipped and the backend may be able to do so on the device."""
        return self.on_nonfinite == "skip" and isinstance(self._backend, ChecksOnDevice)

    def _checks_on_device(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the device skips gradients that are not finite, without a synchronisation."""
        return (
            self._may_check_on_device
            and all(group["capturable"] for group in self.param_groups)
            and not any(map(is_sharded, parameters))
        )

    def _perform_all(
        self, tasks: Sequence[tuple[Tensor, Tensor | None, Action]], *, if_finite: bool = False
    ) -> Sequence[Tensor]:
        """Perform actions on parameters; sums over shards are exchanged with other processes once for all of them.

        Args:
            tasks: (parameter, gradient, action). The gradient has the parameter's shape, or is None for `Action.APPLY`, and
                does not change; the action uses the gradient or steps.
            if_finite: skip tasks whose gradient is not finite; every action must be `Action.UPDATE`, and `_checks_on_device`
                must hold.

        Returns:
            With if_finite, for each task a 0-d tensor on the device: 1 if it was performed, 0 if it was skipped.
        """
        if len(tasks) == 1 and not if_finite and not is_sharded(tasks[0][0]):
            self._perform(*tasks[0])
            return ()
        updates: list[tuple[TensorSlot, Tensor]] = []
        shards: list[TensorSlot] = []  # their step needs the mean squares of the other parts
        steps: list[TensorSlot] = []
        for parameter, gradient, action in tasks:
            slot, here = self._known_slot(parameter), local(gradient)
            if action.steps:
                steps.append(slot)
            if action is Action.UPDATE:
                updates.append((slot, here))
            elif slot.rule.clips_update and action.steps and slot.shard is not None:
                if action is not Action.APPLY:
                    self._backend.accumulate(slot, here, first=False)
                shards.append(slot)
            elif action is Action.APPLY:
                self._backend.apply(slot)
            else:
                (self._backend.update if action.steps else self._backend.accumulate)(slot, here, first=action.first)
        applied: Sequence[Tensor] = ()
        if if_finite:
            assert isinstance(self._backend, ChecksOnDevice)
            applied = self._backend.update_each_if_finite(updates)
        elif updates:
            self._update_slots(updates)
        self._apply_shards(shards)
        _advance(steps, applied)
        self._skipped.add_unapplied(applied)
        return applied

    def _update(self, parameter: Tensor, gradient: Tensor, *, measure: bool = False) -> Tensor | None:
        """Perform `Action.UPDATE` on one parameter that is not sharded.

        Returns:
            With `measure`, the sum of the gradient's squares, 0-d in the compute dtype, if the backend has computed it.
        """
        slot = self._slots.get(id(parameter)) or self._new_slot(parameter)
        square = self._backend.update(slot, gradient, first=True, measure=measure)
        count_updates((slot,))
        return square

    def _update_all(self, ready: Sequence[tuple[Tensor, Tensor]], *, measure: bool = False) -> Sequence[Tensor] | None:
        """Perform `Action.UPDATE` on (parameter, gradient) pairs; the gradient of a sharded parameter is the local part.

        Returns:
            With `measure`, which no sharded parameter may have, the sum of each gradient's squares as `_update` returns it.
        """
        slots = self._slots
        pairs = [(slots.get(id(parameter)) or self._new_slot(parameter), gradient) for parameter, gradient in ready]
        squares = self._update_slots(pairs, measure=measure)
        count_updates([slot for slot, _ in pairs])
        return squares

    def _update_slots(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, measure: bool = False) -> Sequence[Tensor] | None:
        if self._clips:
            clipping = [pair for pair in pairs if pair[0].rule.clips_update]
            if any(shards := [slot.shard for slot, _ in clipping]):
                self._backend.update_all(clipping, over_shards=functools.partial(means_over_shards, shards))
                pairs = [pair for pair in pairs if not pair[0].rule.clips_update]
        if len(pairs) != 1:
            return self._backend.update_all(pairs, measure=measure)
        square = self._backend.update(*pairs[0], first=True, measure=measure)
        return None if square is None else [square]

    def _perform(self, parameter: Tensor, gradient: Tensor | None, action: Action) -> None:
        """Perform an action on one parameter that is not sharded."""
        slot, backend = self._known_slot(parameter), self._backend
        if gradient is None:
            backend.apply(slot)
        elif action.steps:
            backend.update(slot, gradient, first=action.first)
        else:
            backend.accumulate(slot, gradient, first=action.first)
        if action.steps:
            count_updates((slot,))

    def _update_if_all_finite(self, ready: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        """Update all parameters or, if a gradient is not finite, none; `_checks_on_device` must hold.

        Args:
            ready: (parameter, gradient) pairs.

        Returns:
            One 0-d tensor on a device: 1 if the parameters were updated, 0 if not. Empty if there are no pairs.
        """
        assert isinstance(self._backend, ChecksOnDevice)
        pairs = [(self._known_slot(parameter), gradient) for parameter, gradient in ready]
        if not pairs:
            return ()
        applied = self._backend.update_all_if_finite(pairs)
        _advance([slot for slot, _ in pairs], [applied] * len(pairs))
        self._skipped.add_unapplied([applied])
        return [applied]

    def _apply_shards(self, slots: Sequence[TensorSlot]) -> None:
        """Step tensors whose clip factor depends on other processes' shards: mean squares are exchanged once for all."""
        squares = means_over_shards([slot.shard for slot in slots], [slot.state["mean_square"] for slot in slots])
        for slot, square in zip(slots, squares, strict=True):
            slot.state["mean_square"] = square
            self._backend.apply(slot)

    # -- what a backend gets ---------------------------------------------------------------------------------------------

    def _refresh(self) -> bool:
        """Read the groups again: validate settings that have changed, express moments under betas that have changed, and drop
        slots that are out of date.

        Called at the beginning of a step, and of a backward pass under release: users may change groups, settings, state and
        parameters in any way in between.

        Returns:
            Whether a slot was dropped, or a parameter added or removed.

        Raises:
            InvalidArgumentError: a setting is out of range or on another device; nothing was changed.
            RefusedError: betas changed in the middle of an update; nothing was changed.
        """
        groups = self.param_groups
        known = self._groups
        if len(known) != len(groups) or not all(map(KnownGroup.is_current, known, groups)):
            for group in groups:
                check_complete(group)
            self._check_kernels()
            fresh = [KnownGroup(group, GroupSettings(rule_of(group), hyperparameters(group))) for group in groups]
            self._follow_betas(fresh)
            self._forget_groups()
            self._groups = fresh
            self._clips = any(entry.settings.rule.clips_update for entry in fresh)
            self._whole = {id(parameter): parameter for parameter in self._parameters()}
            return True
        for entry, group in zip(known, groups, strict=True):
            entry.refresh(group)
        self._follow_betas(known)
        parameters, states = self._whole, {id(parameter): state for parameter, state in self.state.items()}
        outdated = []
        for key, slot in self._slots.items():
            whole = parameters[key]
            here, state = (whole, slot.state) if slot.shard is None else (local(whole), slot.state.whole)
            if slot.parameter is here and state is states.get(key) and slot.step is slot.state.get("step"):
                (kind, dtype, device, shape), address = slot.kind, slot.step_address
                same = type(whole) is kind and whole.dtype is dtype and whole.device == device and whole.shape == shape
                if same and (not address or slot.step.data_ptr() == address):
                    continue
            outdated.append(key)
        for key in outdated:
            del self._slots[key]
        return bool(outdated)

    def _follow_betas(self, groups: list[KnownGroup]) -> None:
        """Express the moments of groups whose betas have changed under the new ones."""
        changed = [entry for entry in groups if entry.betas_have_changed()]
        for entry in changed:
            check_between_updates(entry.group, groups.index(entry), self.state)
        for entry in changed:
            entry.follow_betas(self.state)
            for key in entry.ids:  # a higher beta may need stochastic rounding
                if key in self._slots and "bfloat16" in self._slots[key].dtypes:
                    del self._slots[key]

    def _known_slot(self, parameter: Tensor) -> TensorSlot:
        """Return the parameter's slot: what its update reads and writes. The groups must be up to date (`_refresh`)."""
        return self._slots.get(id(parameter)) or self._new_slot(parameter)

    def _slot(self, parameter: Tensor) -> TensorSlot:
        """Return the parameter's slot, after a `_refresh`."""
        self._refresh()
        return self._known_slot(parameter)

    def _new_slot(self, parameter: Tensor) -> TensorSlot:
        entry = next(known for known in self._groups if id(parameter) in known.ids)
        group, current, name = entry.group, entry.settings.hyperparameters, dtype_name(parameter.dtype)
        compensation = compensations.resolve(group["compensation"], name)
        check_device(current, parameter)
        check_shape(entry.settings.rule, parameter)  # of a lazy module it was not known before
        state = self.state[parameter]
        if not state:
            state.update(saved_state.initial_state(group, parameter, current))
        saved_state.check_fits(group, current, state, parameter)
        shard = shard_of(parameter)
        here = state if shard is None else LocalState(state)
        slot = TensorSlot(local(parameter), here, compensation, entry.settings.rule, entry.settings, group["capturable"], shard)
        slot.kind = type(parameter), parameter.dtype, parameter.device, parameter.shape
        random = codings.random_fields(slot.rule.fields, slot.dtypes, slot.rule.decays(current))
        slot.random = (*((0,) if compensation in compensations.WITH_RANDOM_BITS else ()), *random)
        if slot.random or slot.coded:
            self._check_rows([parameter])
            slot.first_index = first_index(parameter)
        if slot.random:
            if saved_state.RANDOM_KEY not in state:
                name = self._name(group, parameter)
                state[saved_state.RANDOM_KEY] = random_bits.tensor_key(group.get("seed", 0), name)
            slot.random_key = int(state[saved_state.RANDOM_KEY])
        self._slots[id(parameter)] = slot
        return slot

    def _name(self, group: Mapping[str, Any], parameter: Tensor) -> str:
        """Return the name with which a parameter was given, or its number."""
        for name, given in zip(group.get("param_names", ()), group["params"], strict=False):
            if given is parameter:
                return str(name)
        return str(list(self._whole).index(id(parameter)))


def _advance(slots: Sequence[TensorSlot], applied: Sequence[Tensor] = ()) -> None:
    """Count an update of each tensor: add one, or its element of `applied`, which is 0 if the device skipped it."""
    if not applied:
        count_updates(slots)
        return
    by_device: dict[torch.device, list[int]] = {}
    steps = [slot.step for slot in slots]
    for position, step in enumerate(steps):
        by_device.setdefault(step.device, []).append(position)
    for device, here in by_device.items():
        amounts = [applied[i].to(device, non_blocking=True) for i in here]
        counts = [steps[i] for i in here]
        torch._foreach_add_(counts, amounts)  # pyright: ignore[reportPrivateImportUsage]  (documented: Foreach Operations)
