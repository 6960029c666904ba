"""The base of the optimizers: groups, state, step(), and where gradient release is attached."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import InvalidArgumentError, NonFiniteGradientError, RefusedError
from ..core.release import Action
from . import state as saved_state
from .backends import select_backend
from .finiteness import SkipCount, each_finite
from .groups import PLAIN_GRADIENT, Group, check_gradient, check_group, hyperparameters
from .updates import TensorUpdates

if TYPE_CHECKING:
    from .release import Release

ON_NONFINITE = ("propagate", "skip", "raise")


class ReleasableOptimizer(TensorUpdates):
    """What StableAdamW, AdamW and Adam share: groups, state, the step, and the place where release is attached.

    The unit of work is one action of the release state machine on one parameter: gradient release calls `perform` from its
    hooks, and `step()` does "update" for every parameter that has a gradient.
    """

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
            raise InvalidArgumentError(
                f"on_nonfinite={on_nonfinite!r} is not known; it must be one of {', '.join(ON_NONFINITE)}."
            )
        if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
            raise InvalidArgumentError(f"state_dtype={state_dtype!r} is not a dtype; give for instance torch.float32, or None.")
        if not isinstance(gradient_release, bool):
            raise InvalidArgumentError(f"gradient_release={gradient_release!r} must be True or False.")
        self.release: Release | None = None
        self._on_nonfinite = on_nonfinite
        self.gradient_release = gradient_release
        self._skipped = SkipCount()
        self._optimizer_accumulation = False
        self._warned_of_decay = False
        self._forget_groups()
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
    def on_nonfinite(self) -> str:
        """What becomes of a gradient with an infinity or a NaN: "propagate", "skip" or "raise"."""
        return self._on_nonfinite

    @on_nonfinite.setter
    def on_nonfinite(self, policy: str) -> None:
        if policy not in ON_NONFINITE:
            raise InvalidArgumentError(f"on_nonfinite={policy!r} is not known; it must be one of {', '.join(ON_NONFINITE)}.")
        if self.release is not None:
            raise RefusedError("on_nonfinite cannot change while gradients are released; call remove() on the release first.")
        self._on_nonfinite = policy

    @property
    def optimizer_accumulation(self) -> bool:
        """Under gradient_release=True: put the gradients of the next backward into the moments, and do not step yet."""
        return self._optimizer_accumulation

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, accumulate: bool) -> None:
        if accumulate and not self.gradient_release:
            raise RefusedError(
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
                self.release._check_ownership(group["params"])
        except Exception:
            del self.param_groups[before:]
            raise
        self._warn_of_decay(group)
        if self.release is not None:
            self.release._pipeline.attach()

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

    # -- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; under release, flush what is pending and close the step.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            RefusedError: under release, an exact result is not possible; nothing was changed.
            UnsupportedTensorError: a gradient is sparse or complex; nothing was changed.
            NonFiniteGradientError: on_nonfinite="raise"; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.release is not None:
            self.release._close_step()
            return loss
        if self._optimizer_accumulation:
            raise RefusedError(
                "optimizer_accumulation=True has no effect before prepare_for_gradient_release(model, optimizer); call that."
            )
        self._refresh()
        ready = [(p, gradient) for p in self._parameters() if (gradient := p.grad) is not None]
        unusual = [pair for pair in ready if type(pair[1]) is not Tensor or pair[1].layout is not PLAIN_GRADIENT]
        for parameter, gradient in unusual:
            check_gradient(parameter, gradient)
        if self._checks_on_device(parameter for parameter, _ in ready):
            self._update_if_all_finite(ready)
            return loss
        if self.on_nonfinite != "propagate" and not all(each_finite(ready)):
            if self.on_nonfinite == "raise":
                raise NonFiniteGradientError("a gradient holds an infinity or a NaN; the step was not taken.")
            self._count_skipped()
            return loss
        if unusual:
            self._perform_all([(parameter, gradient, Action.UPDATE) for parameter, gradient in ready])
        else:
            self._update_all(ready)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Under release, also closes the step: gradients that are held are discarded, as without release.

        Under release set_to_none=False has no effect, as the gradients are gone already: a parameter that a later step does
        not use is left alone, where zeros would decay its moments and weights.

        Raises:
            RefusedError: under release, step() was not called, and a gradient that is not finite was used; the step is closed.
        """
        if self.release is None:
            super().zero_grad(set_to_none)
            return
        self.release._discard_step()
        for parameter in self._parameters():
            parameter.grad = None

    # -- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Raises `RefusedError` under release between the first gradient of an update and its step()."""
        if self.release is not None:
            self.release._require_closed("state_dict()")
        return saved_state.sendable(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch, and every state tensor keeps the dtype it was saved with: training resumes bit for bit.

        Raises:
            InvalidArgumentError: the state is another optimizer's or another model's; nothing was changed.
            RefusedError: in the middle of a step under release; nothing was changed.
        """
        if self.release is not None:
            self.release._require_closed("load_state_dict()")
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
            self.release._require_closed("a copy or pickle of the optimizer")
        kept = ("_on_nonfinite", "gradient_release", "_warned_of_decay", "_optimizer_accumulation")
        backend = {"_backend_name": self.backend, "_skipped": self.skipped}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, **backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend = state.pop("_backend_name", None)
        super().__setstate__(state)
        self._forget_groups()
        if isinstance(self.__dict__.get("_skipped"), int):
            self._skipped = SkipCount(self.__dict__["_skipped"])
        if backend is not None:  # a copy or an unpickled optimizer: hooks are on the parameters of the original
            self.release = None
            self._backend = select_backend(backend, self._parameters())
