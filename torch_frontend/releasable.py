"""The base class of the optimizers: groups, state, step(), and the release that may be attached."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import InvalidArgumentError, NonFiniteGradientError, RefusedError
from ..core.precision import chosen
from ..core.release import Action
from ..core.rules import RULES
from . import state as saved_state
from .backends import Backend, select_backend
from .changing_betas import default_betas_of_moments
from .checks import PLAIN_GRADIENT, check_group, check_keys, check_state_dtype_is_used
from .finiteness import SkipCount, each_finite
from .fused_back_pass import FusedBackPass
from .groups import Group, complete_group, follow_rows, hyperparameters, rule_of
from .signatures import COMMON, bound_arguments

if TYPE_CHECKING:
    from .release import Release

ON_NONFINITE = ("propagate", "skip", "raise")


class ReleasableOptimizer(FusedBackPass):
    """Base class of the optimizers.

    Attributes:
        rule: what the subclass computes, where a group does not name another rule.
        release: the gradient release of this optimizer, or None.
        gradient_release: whether the optimizer was constructed for `prepare_for_gradient_release`.
    """

    _asked: frozenset[str] = frozenset()  # which settings of storage were given to the constructor, not left out
    _step_supports_amp_scaling = False  # GradScaler unscales the gradients before step(), as for most optimizers

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):  # a user's subclass does not have the signature of `documented`
            own: Any = cls
            _, *parameters = inspect.signature(own.__init__).parameters.values()
            own.__signature__ = inspect.Signature(parameters)

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        bound = bound_arguments(self.rule, type(self).__name__, params, args, kwargs)
        chose = bound.arguments.keys() & {"precision", "compensation", "state_dtype"}
        self._asked = frozenset(("compensation", "state_dtype") if "precision" in chose else chose)
        bound.apply_defaults()
        given = bound.arguments
        by_user = {name: given[name] for name in ("compensation", "state_dtype") if given[name] != COMMON[name]}
        preset = chosen(given.pop("precision"), by_user)
        if not by_user:
            given |= {"compensation": preset.compensation, "state_dtype": preset.state_dtype}
        _, backend, on_nonfinite, gradient_release = map(given.pop, ("params", "backend", "on_nonfinite", "gradient_release"))
        if on_nonfinite not in ON_NONFINITE:
            raise InvalidArgumentError(
                f"on_nonfinite={on_nonfinite!r} is not known; it must be one of {', '.join(ON_NONFINITE)}."
            )
        if not isinstance(gradient_release, bool):
            raise InvalidArgumentError(f"gradient_release={gradient_release!r} must be True or False.")
        if RULES.get(self.rule.name) is not self.rule:
            raise InvalidArgumentError(
                f"the rule {self.rule.name!r} of {type(self).__name__} is not in penstock.core.rules.RULES, where groups and "
                "files look it up; give it a name and a row there."
            )
        self._released: Callable[[], Release] | None = None
        self._on_nonfinite = on_nonfinite
        self.gradient_release = gradient_release
        self._skipped = SkipCount()
        self._optimizer_accumulation = False
        self._warned_of_decay = False
        self._forget_groups()
        super().__init__(params, {"rule": self.rule.name, **given})
        if "state_dtype" in by_user:
            check_state_dtype_is_used(self.param_groups)
        self._backend = self._selected(backend)

    @property
    def release(self) -> Release | None:
        """The release that `release_gradients` made, until its remove()."""
        return None if self._released is None else self._released()

    @property
    def backend(self) -> str:
        """Name of the backend in use: "triton", "compiled" or "eager"."""
        return self._backend.name

    def _selected(self, backend: str) -> Backend:
        self._rules = frozenset(map(rule_of, self.param_groups))
        in_rows = [parameter for group in self.param_groups for parameter in follow_rows(group)]
        return select_backend(backend, self._parameters(), self._rules, in_rows)

    @property
    def on_nonfinite(self) -> str:
        """What is done with a gradient that contains an infinity or a NaN: "propagate", "skip" or "raise"."""
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
        """Whether the next backward only puts its gradients into the moments; for gradient_release=True."""
        return self._optimizer_accumulation

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, accumulate: bool) -> None:
        if accumulate and not self.gradient_release:
            raise RefusedError(
                "optimizer_accumulation=True needs gradient_release=True in the constructor and "
                "prepare_for_gradient_release(model, optimizer); or use release_gradients(..., accumulation='state')."
            )
        if accumulate:
            for group in self.param_groups:
                instead = "call step() after each backward, or use release_gradients(..., accumulation='hold')"
                rule_of(group).check_accumulates(instead)
        self._optimizer_accumulation = bool(accumulate)

    # -- groups ---------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. Under release its parameters get their hooks at once.

        A group may name another rule than the optimizer's: {"params": ..., "rule": "sgd_momentum", "momentum": 0.95}. Settings
        that only this rule has are then its own by default, the others the optimizer's.
        """
        before = len(self.param_groups)
        given = set(param_group) if isinstance(param_group, dict) else ()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_keys(group, given, self.defaults, COMMON.keys() - self.defaults.keys())
            complete_group(group, given, self.rule)
            if "state_dtype" in given:
                check_state_dtype_is_used([group])
            check_group(group)
            default_betas_of_moments(group)
            self._check_rows(follow_rows(group))
            self._check_kernels()
            if (release := self.release) is not None:
                release._check_group(group)
        except Exception:
            del self.param_groups[before:]
            raise
        self._warn_of_decay(group)
        if (release := self.release) is not None:
            release._pipeline.attach()

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
        """Update every parameter that has a gradient; under release, use the pending gradients and close the step.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            RefusedError: an exact result is not possible under release; nothing was changed.
            UnsupportedTensorError: a gradient is sparse or complex; nothing was changed.
            NonFiniteGradientError: on_nonfinite="raise"; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (release := self.release) is not None:
            release._close_step()
            return loss
        if self._optimizer_accumulation:
            raise RefusedError(
                "optimizer_accumulation=True has no effect before prepare_for_gradient_release(model, optimizer); call that."
            )
        self._refresh()
        ready = [(p, gradient) for p in self._whole.values() if (gradient := p.grad) is not None]
        unusual = [pair for pair in ready if type(pair[1]) is not Tensor or pair[1].layout is not PLAIN_GRADIENT]
        for pair in unusual:
            self._check_usable(*pair)
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
        """Clear all gradients, as in torch. Under release this discards held gradients and closes the step.

        Under release gradients are always set to None: a parameter without a gradient in a later step is then left alone,
        where a gradient of zeros would decay its moments and weights.

        Raises:
            RefusedError: under release, a gradient that is not finite was used without step(); the step is closed.
        """
        release = self.release
        if release is None:
            super().zero_grad(set_to_none)
        else:
            release._discard_step()

    # -- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as in torch. Raises `RefusedError` under release in the middle of a step."""
        if (release := self.release) is not None:
            release._require_closed("state_dict()", reads=True)
        return saved_state.sendable(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, as in torch. State tensors keep the dtype they were saved with: training resumes bit for bit.

        Raises:
            InvalidArgumentError: the state is of another optimizer or model; nothing was changed.
            RefusedError: a step under release is not closed; nothing was changed.
        """
        if (release := self.release) is not None:
            release._require_closed("load_state_dict()")
        final: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            saved_state.check_loadable(given, self.param_groups, self._asked)
            final.update(given)

        handle = self.register_load_state_dict_pre_hook(check)  # runs last, after the user's own hooks
        try:
            super().load_state_dict(saved_state.with_present_keys(self.rule.name, state_dict))
        finally:
            handle.remove()
        with torch.no_grad():
            saved_state.restore_tensors(final, self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        if (release := self.release) is not None:
            release._require_closed("a copy or pickle of the optimizer")
        kept = ("_asked", "_on_nonfinite", "gradient_release", "_warned_of_decay", "_optimizer_accumulation")
        backend = {"_backend_name": self.backend, "_skipped": self.skipped}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, **backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend = state.pop("_backend_name", None)
        super().__setstate__(state)
        self._forget_groups()
        for group in self.param_groups:
            group.setdefault("rule", self.rule.name)  # which earlier versions did not save
            default_betas_of_moments(group)
        if isinstance(self.__dict__.get("_skipped"), int):
            self._skipped = SkipCount(self.__dict__["_skipped"])
        if backend is not None:  # a copy or an unpickled optimizer: hooks are on the parameters of the original
            self._released = None
            self._backend = self._selected(backend)
