"""The optimizers. They differ by their rule only; one base class does the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import compensation as compensations
from ..core.errors import InvalidArgument, NonFiniteGradient, Refused
from ..core.hyperparameters import Hyperparameters
from ..core.release import Action
from ..core.rules import ADAM, ADAMW, STABLE_ADAMW, Rule
from . import state as saved_state
from .array_ops import dtype_name
from .backends import ChecksOnDevice, TensorSlot, select_backend
from .communication.shards import LocalState, is_sharded, local, sum_over_shards
from .finiteness import SkipCount, all_finite
from .groups import Group, check_gradient, check_group, fingerprint, hyperparameters

if TYPE_CHECKING:
    from .release import Release

ON_NONFINITE = ("propagate", "skip", "raise")


class ReleasableOptimizer(Optimizer):
    """What StableAdamW, AdamW and Adam share: groups, state, the step, and the place where release is attached.

    The unit of work is one action of the release state machine on one parameter: gradient release calls `perform` from its
    hooks, and `step()` does "update" for every parameter that has a gradient.
    """

    rule: ClassVar[Rule]
    _skipped: SkipCount
    _opt_called: bool  # what a scheduler looks for before it complains about the order of calls
    _step_supports_amp_scaling = False  # GradScaler then unscales the gradients before step(), as for any optimizer

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        *,
        decouple_lr: bool = False,
        max_lr: float | None = None,
        compensation: str = "auto",
        state_dtype: torch.dtype | None = None,
        backend: str = "auto",
        on_nonfinite: str = "propagate",
        maximize: bool = False,
        capturable: bool = False,
        gradient_release: bool = False,
    ) -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise InvalidArgument(f"on_nonfinite={on_nonfinite!r} is not known; it must be one of {', '.join(ON_NONFINITE)}.")
        if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
            raise InvalidArgument(f"state_dtype={state_dtype!r} is no dtype; give for instance torch.float32, or None.")
        self.release: Release | None = None
        self.on_nonfinite = on_nonfinite
        self.gradient_release = gradient_release
        self.skipped = 0
        self._optimizer_accumulation = False
        self._warned_of_decay = False
        self._group_map: tuple[list[int], dict[Tensor, Group]] | None = None
        self._validated: dict[int, tuple[tuple[Any, ...], Hyperparameters]] = {}
        defaults = {
            "lr": lr,
            "betas": self.rule.betas if betas is None else betas,
            "eps": self.rule.eps if eps is None else eps,
            "weight_decay": self.rule.weight_decay if weight_decay is None else weight_decay,
            "decouple_lr": decouple_lr,
            "max_lr": max_lr,
            "maximize": maximize,
            "capturable": capturable,
            "compensation": compensation,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)
        self._backend = select_backend(backend, self._parameters())

    @property
    def backend(self) -> str:
        """The name of the backend in use; with backend="auto", the one that was picked."""
        return self._backend.name

    @property
    def skipped(self) -> int:
        """Steps, or under release gradients, that were not used because they held an infinity or a NaN.

        Reading it waits for the device where only that knows: backend="triton" with capturable=True.
        """
        return self._skipped.total

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped = SkipCount(count)

    def count_skipped(self, count: int = 1) -> None:
        """So many more; nobody waits for the device."""
        self._skipped.add(count)

    @property
    def launches_together(self) -> bool:
        """Whether the backend updates many small tensors at the cost of one."""
        return self._backend.one_launch

    @property
    def optimizer_accumulation(self) -> bool:
        """Under gradient_release=True: put the gradients of the next backward into the moments, and do not step yet."""
        return self._optimizer_accumulation

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, accumulate: bool) -> None:
        if accumulate and not self.gradient_release:
            raise Refused(
                "optimizer_accumulation=True needs gradient_release=True in the constructor and "
                "prepare_for_gradient_release(model, optimizer); or use release_gradients(..., accumulation='state')."
            )
        self._optimizer_accumulation = bool(accumulate)

    # -- groups ---------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Under release the new parameters get their hooks at once."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(self.rule, group)
            if self.release is not None:
                self.release.hooks.check_ownership(group["params"])
        except Exception:
            del self.param_groups[before:]
            raise
        self._warn_of_decay(group)
        if self.release is not None:
            self.release.attach()

    def _warn_of_decay(self, group: Group) -> None:
        if self._warned_of_decay or not hyperparameters(group).fully_decoupled_decay_is_high:
            return
        self._warned_of_decay = True
        warnings.warn(
            f"weight_decay={group['weight_decay']} is high for decouple_lr=True: fully decoupled weight decay is not "
            "multiplied by the learning rate, only by its schedule. Values from 1e-6 to 1e-4 are usual.",
            UserWarning,
            stacklevel=5,
        )

    def group_of(self, parameter: Tensor) -> Group:
        """The live group of a parameter: load_state_dict replaces the group dicts, so none is ever kept."""
        return self._groups()[parameter]

    def _groups(self) -> dict[Tensor, Group]:
        identities = [id(group) for group in self.param_groups]
        if self._group_map is None or self._group_map[0] != identities:
            self._group_map = (identities, {p: group for group in self.param_groups for p in group["params"]})
        return self._group_map[1]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; under release, flush what is pending and close the step.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            Refused: under release, an exact result is not possible; nothing was changed.
            UnsupportedTensor: a gradient is sparse or complex; nothing was changed.
            NonFiniteGradient: on_nonfinite="raise"; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.release is not None:
            self.release.close_step()
            return loss
        if self._optimizer_accumulation:
            raise Refused(
                "optimizer_accumulation=True has no effect before prepare_for_gradient_release(model, optimizer); call that."
            )
        self.check_settings()
        ready = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for parameter, gradient in ready:
            check_gradient(parameter, gradient)
        if self.checks_on_device(parameter for parameter, _ in ready):
            self.update_if_all_finite(ready)
            return loss
        if self.on_nonfinite != "propagate" and not all_finite(gradient for _, gradient in ready):
            if self.on_nonfinite == "raise":
                raise NonFiniteGradient("a gradient holds an infinity or a NaN; the step was not taken.")
            self.count_skipped()
            return loss
        self.perform_all([(parameter, gradient, Action.UPDATE) for parameter, gradient in ready])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Under release, also closes the step: gradients that are held are discarded, as without release.

        Under release set_to_none=False has no effect, as the gradients are gone already: a parameter that a later step does
        not use is left alone, where zeros would decay its moments and weights.

        Raises:
            Refused: under release, step() was not called, and a gradient that is not finite was used; the step is closed.
        """
        if self.release is not None:
            self.release.discard()
            set_to_none = True
        super().zero_grad(set_to_none)

    def check_settings(self) -> None:
        """Raise `InvalidArgument` if any group's hyperparameters are out of range now."""
        for group in self.param_groups:
            self._hyperparameters(group)

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
        shards: list[tuple[Tensor, TensorSlot]] = []
        steps: list[Tensor] = []
        clips = self.rule.clips_update
        slots = self._slots([parameter for parameter, _, _ in tasks])
        for (parameter, gradient, action), slot in zip(tasks, slots, strict=True):
            here = local(gradient)
            update = action is Action.UPDATE
            if update or action.steps:
                steps.append(slot.state["step"])
            if clips and is_sharded(parameter) and (update or action.steps):
                if here is not None and action is not Action.APPLY:
                    self._backend.accumulate(slot, here, first=action.first)
                shards.append((parameter, slot))
            elif update:
                updates.append((slot, here))
            elif action is Action.APPLY:
                self._backend.apply(slot)
            else:
                (self._backend.update if action.steps else self._backend.accumulate)(slot, here, first=action.first)
        applied: Sequence[Tensor] = ()
        if if_finite:
            assert isinstance(self._backend, ChecksOnDevice)
            applied = self._backend.update_each_if_finite(updates)
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
        squares = [slot.state["mean_square"] * slot.parameter.numel() for _, slot in shards]
        totals = sum_over_shards([parameter for parameter, _ in shards], squares)
        for (parameter, slot), total in zip(shards, totals, strict=True):
            slot.state["mean_square"] = total / max(1, parameter.numel())
            self._backend.apply(slot)

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

    def _slots(self, parameters: Iterable[Tensor]) -> list[TensorSlot]:
        """Those of many, where a group is looked at once."""
        groups, slots = self._groups(), []
        known: dict[tuple[int, torch.dtype], tuple[Hyperparameters, str, bool]] = {}
        for parameter in parameters:
            group = groups[parameter]
            key = (id(group), parameter.dtype)
            if key not in known:
                compensation = compensations.resolve(group["compensation"], dtype_name(parameter.dtype))
                known[key] = (self._hyperparameters(group), compensation, group["capturable"])
            current, compensation, capturable = known[key]
            state = self.state[parameter]
            if not state:
                state.update(saved_state.initial_state(group, parameter, current))
            here = LocalState(state) if is_sharded(parameter) else state
            slots.append(TensorSlot(local(parameter), here, compensation, self.rule, current, capturable))
        return slots

    # -- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Raises `Refused` under release between the first gradient of an update and its step()."""
        if self.release is not None:
            self.release.require_closed("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch, and every state tensor keeps the dtype it was saved with: training resumes bit for bit.

        Raises:
            InvalidArgument: the state is another optimizer's or another model's; nothing was changed.
            Refused: in the middle of a step under release; nothing was changed.
        """
        if self.release is not None:
            self.release.require_closed("load_state_dict()")
        final: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            saved_state.check_loadable(self.rule, given, self.param_groups)
            final.update(given)

        handle = self.register_load_state_dict_pre_hook(check)  # runs last: it sees what the user's own hooks made of it
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        with torch.no_grad():
            saved_state.restore_dtypes(final, self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        if self.release is not None:
            self.release.require_closed("a copy or pickle of the optimizer")
        kept = ("on_nonfinite", "gradient_release", "_warned_of_decay", "_optimizer_accumulation")
        backend = {"_backend_name": self.backend, "_skipped": self.skipped}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, **backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend = state.pop("_backend_name", None)
        super().__setstate__(state)
        self._group_map = None
        self._validated = {}
        if isinstance(self.__dict__.get("_skipped"), int):
            self.skipped = self.__dict__["_skipped"]
        if backend is not None:  # a copy or an unpickled optimizer: hooks are on the parameters of the original
            self.release = None
            self._backend = select_backend(backend, self._parameters())


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


class StableAdamW(ReleasableOptimizer):
    r"""AdamW with Adafactor's update clipping: no gradient clipping is needed.

        m += c1*(g-m)      v += c2*(g*g-v)      c = (1-beta)/(1-beta^t)
        eta = lr / max(1, sqrt(mean(g*g / max(v, eps^2))))
        p <- p - eta*(m/(sqrt(v)+eps) + weight_decay*p)

    The arithmetic is float32 (float64 for float64 parameters), with one rounding at the end.

    Args:
        params: tensors, named tensors, or groups; float64, float32, bfloat16 or float16, dense, any shape.
        lr: step size, a number in [0, inf) or a 0-d tensor.
        betas: decay of the two moments, each in [0, 1).
        eps: in (0, inf).
        weight_decay: decoupled weight decay, in [0, inf). The clip factor applies to it as well.
        decouple_lr: fully decoupled weight decay: scaled by eta/max_lr instead of eta.
        max_lr: the highest learning rate of the schedule, in (0, inf); default: each group's initial lr.
            `OneCycleLR` writes its own into the groups.
        compensation: how low-precision parameters keep the bits that rounding loses: "none", "kahan" (in the parameter's
            dtype), "split" (bfloat16 and an int16 are together the exact float32), or "auto": split for bfloat16, kahan
            for float16.
        state_dtype: dtype of the moments; default: the parameter's, and float32 for a second moment that it cannot hold.
        backend: "auto", "triton", "compiled" or "eager". What "auto" picked is in `.backend`.
        on_nonfinite: a gradient with an infinity or a NaN: "propagate" it, "skip" the step and count it in `.skipped`, or
            "raise" before anything is changed. The last two wait for the device, except that backend="triton" with
            capturable=True skips without anybody waiting: a step(), and under release a gradient.
        maximize: ascend.
        capturable: keep the step counts on the parameters' device, so that a step can be captured in a CUDA graph.
        gradient_release: for `prepare_for_gradient_release`; new code calls `release_gradients` instead.

    Raises:
        InvalidArgument: a value out of range; the text names it and the range.
        UnsupportedTensor: a complex, integer or sparse parameter, or a DTensor of partial sums.

    Source: Wortsman et al., 2023, https://arxiv.org/abs/2304.13013, algorithm 2.
    """

    rule = STABLE_ADAMW


class AdamW(ReleasableOptimizer):
    """AdamW with a folded decay: p <- p - lr*(m/(sqrt(v)+eps) + weight_decay*p).

    Arguments and errors are those of `StableAdamW`; the defaults of betas, eps and weight_decay are torch's: (0.9, 0.999),
    1e-8 and 1e-2. In float64 it equals `torch.optim.AdamW`.

    Source: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101.
    """

    rule = ADAMW


class Adam(ReleasableOptimizer):
    """Adam with L2 regularisation: g += weight_decay*p, then p <- p - lr*m/(sqrt(v)+eps).

    Arguments and errors are those of `StableAdamW`, except that decouple_lr is refused; the defaults of betas, eps and
    weight_decay are torch's: (0.9, 0.999), 1e-8 and 0. In float64 it equals `torch.optim.Adam`.

    Source: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980.
    """

    rule = ADAM
