"""Updates of one parameter at a time, which a trainer's own hooks ask for inside the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidArgumentError, RefusedError
from ..core.release import Action
from .autograd.passes import at_end_of_pass, is_nested, pass_number
from .autograd.reentrant import PartialGradients
from .finiteness import each_finite
from .updates import TensorUpdates

_LOCK = threading.RLock()  # autograd runs the hooks of several devices in several threads


class FusedBackPass(TensorUpdates):
    """The part of an optimizer that OneTrainer, kohya's sd-scripts and musubi-tuner use as their fused back pass.

    Attributes:
        supports_fused_back_pass: True; these trainers, and other optimizers for them, know the protocol by this name.
    """

    supports_fused_back_pass = True
    release: Any
    _opt_called: bool  # read by torch's schedulers, which warn if step() was not called first
    _passes: _Passes | None = None

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, group: Mapping[str, Any], index: int | None = None) -> None:
        """Update one parameter from its gradient, and free the gradient: step() for a trainer's own hook.

        After all parameters the model is the one that step() makes of the same gradients, bit for bit. step() then has nothing
        left to do, and may be called or not. With on_nonfinite="skip" each parameter is skipped by itself.

        Args:
            parameter: of this optimizer, with its whole gradient in `.grad`: unscaled, and averaged over processes.
            group: the one of `param_groups` that has it; its present settings are used.
            index: position of the parameter in `group["params"]`; None: anywhere in it.

        Raises:
            InvalidArgumentError: group is not one of `param_groups`, or the parameter is not in it; nothing was changed.
            RefusedError: gradients are released by `release_gradients`, there is no gradient, only a part of it has come, or
                on_nonfinite="raise"; nothing was changed.
            UnsupportedTensorError: the gradient is sparse or complex; nothing was changed.

        Example:
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    parameter.register_post_accumulate_grad_hook(functools.partial(
                        optimizer.step_parameter, group=group, index=index
                    ))

        Source: https://github.com/Nerogar/OneTrainer, `GenericTrainer`, `__apply_fused_back_pass`.
        """
        with _LOCK:
            gradient = self._fused_gradient(parameter)
            if not any(group is live for live in self.param_groups):
                raise InvalidArgumentError(
                    "group is not one of optimizer.param_groups: it is a copy, or load_state_dict() has replaced it since; "
                    "register the hooks after load_state_dict()."
                )
            if self._passes is None:
                self._passes = _Passes()
            if self._passes.another_begins():
                self._refresh()
            known = next(entry for entry in self._groups if entry.group is group)
            if id(parameter) not in known.ids or (index is not None and not _is_at(index, parameter, group["params"])):
                raise InvalidArgumentError(
                    f"parameter, of shape {tuple(parameter.shape)}, is not "
                    f"{'in the group' if index is None else f'number {index} of the group'} that step_parameter() was called "
                    "with; give the group (and index) of optimizer.param_groups that has it."
                )
            if parameter in self._passes.in_parts:
                self._passes = None
                raise RefusedError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} comes in several parts in one backward "
                    "(reentrant checkpointing of a layer that is used several times), and each would be used as if it were the "
                    "whole. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
                )
            by_device = self._checks_on_device((parameter,))
            if by_device or self.on_nonfinite == "propagate" or each_finite([(parameter, gradient)])[0]:
                self._perform_all([(parameter, gradient, Action.UPDATE)], if_finite=by_device)
            else:
                self._count_skipped()
            parameter.grad = None
            self._opt_called = True

    def _fused_gradient(self, parameter: Tensor) -> Tensor:
        """Return the parameter's gradient, or raise if step_parameter() must not use it."""
        if self.release is not None:
            raise RefusedError(
                "step_parameter() under release_gradients(), which calls no trainer's hook and updates every parameter itself. "
                "Switch the trainer's fused back pass off, or call remove() on the release."
            )
        if self.on_nonfinite == "raise":
            raise RefusedError(
                "on_nonfinite='raise' promises that nothing was changed, which step_parameter() cannot keep: the parameters "
                "of later layers are updated already. Use on_nonfinite='skip'."
            )
        if not isinstance(parameter, Tensor):
            raise InvalidArgumentError(f"parameter is a {type(parameter).__name__}; it must be a tensor of the optimizer.")
        gradient = parameter.grad
        if gradient is None:
            raise RefusedError(
                f"step_parameter(): the parameter, of shape {tuple(parameter.shape)}, has no gradient. It was used already "
                "(are the hooks registered twice?), or backward() has not reached it; call step_parameter() in a hook of "
                "register_post_accumulate_grad_hook."
            )
        self._check_usable(parameter, gradient)
        return gradient


class _Passes:
    """The backward pass that calls step_parameter().

    Attributes:
        in_parts: parameters of which this backward delivers several gradients, each a part.
    """

    def __init__(self) -> None:
        self.in_parts: set[Tensor] = set()
        self._partial = PartialGradients()
        self._now: int | None = None
        self._latest = -1

    def another_begins(self) -> bool:
        """Whether groups and settings are to be read again: once a backward, and at every call outside of one."""
        now = pass_number()
        if now is None or now < 0:
            self.in_parts = set()
            return True
        if now == self._now:
            return False
        nested = is_nested()
        self.in_parts = self._partial.find(nested=nested)
        if not nested or self._partial.all_begun:
            at_end_of_pass(self._partial.forget)  # or the nodes would stay alive
        again = not nested or now != self._latest + 1  # another pass has run since the last nested one
        self._now, self._latest = now, max(self._latest, now)
        return again


def _is_at(index: int, parameter: Tensor, parameters: list[Tensor]) -> bool:
    return isinstance(index, int) and 0 <= index < len(parameters) and parameters[index] is parameter
