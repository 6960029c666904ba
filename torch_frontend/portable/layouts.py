"""Layouts of optimizer state: penstock's as in a portable state, torch.optim's with biased moments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core import compensation as compensations
from ...core.dtypes import StateDtypes, state_dtypes
from ...core.errors import InvalidArgumentError, RefusedError
from ...core.hyperparameters import RANGES, check_number
from ...core.moments import Moments
from ...core.portable.bias import Betas, under_betas, with_bias, without_bias
from ...core.portable.match import Expected
from ...core.portable.state import ParameterState
from ..array_ops import dtype_name
from ..changing_betas import BETAS_OF_MOMENTS, betas_of, set_betas_of_moments
from ..groups import NAMES, Group, check_group, check_parameter, hyperparameters, moment_dtypes
from ..releasable import ReleasableOptimizer
from ..state import MOMENTS, initial_state
from .arrays import laid_out_as

MOST_STEPS = 2**24
"""torch counts steps in float32: the next one would not be counted."""


class OwnLayout:
    """StableAdamW, AdamW and Adam of this package: debiased moments, and a compensation.

    Attributes:
        moments: the keys of both in a parameter's state.
    """

    moments: tuple[str, ...] = MOMENTS

    def __init__(self, optimizer: ReleasableOptimizer) -> None:
        self._optimizer = optimizer
        self.rule = optimizer.rule.name

    def require_closed(self, call: str) -> None:
        """Raise `RefusedError` in the middle of a step under release."""
        if self._optimizer.release is not None:
            self._optimizer.release._require_closed(call)

    def check(self, group: Group) -> None:
        """Raise if a group cannot be optimized so; as at its construction."""
        check_group(self._optimizer.rule, group)

    def initial(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that was never updated."""
        return initial_state(group, parameter, hyperparameters(group))

    def expected(self, group: Group, parameter: Tensor) -> Expected:
        """What is kept for a parameter."""
        name = dtype_name(parameter.dtype)
        moments = moment_dtypes(group, name, hyperparameters(group))
        return Expected(name, tuple(parameter.shape), compensations.resolve(group["compensation"], name), *moments)

    def debiased(self, group: Group, parameter: Tensor, moments: Moments, step: int) -> Moments:
        """Moments as the portable state has them, of those that are kept: debiased under the group's present betas."""
        return under_betas(moments, step, float_betas(group[BETAS_OF_MOMENTS]), self.betas(group))

    def betas(self, group: Group) -> Betas:
        """The betas of the moments in a portable state. It synchronises if they are tensors on a device."""
        return float_betas(betas_of(hyperparameters(group)))

    def imported(self, group: Group) -> None:
        """Called when all parameters of a group have new states."""
        set_betas_of_moments(group, betas_of(hyperparameters(group)))

    def kept(self, group: Group, name: str, entry: ParameterState) -> ParameterState:
        """The entry as it is kept. Raises `InvalidArgumentError` where that is not possible."""
        return entry

    def step_place(self, group: Group, parameter: Tensor) -> torch.device:
        """Where the number of updates is counted."""
        return parameter.device if group["capturable"] else torch.device("cpu")

    def new_state(self, group: Group, name: str, parameter: Tensor, entry: ParameterState) -> dict[str, Tensor]:
        """The tensors of `optimizer.state` for a parameter.

        Raises:
            InvalidArgumentError: the optimizer cannot keep it.
        """
        if entry.step > MOST_STEPS:
            raise InvalidArgumentError(f"step of {name!r} is {entry.step}; torch's optimizers count to {MOST_STEPS}.")
        entry = self.kept(group, name, entry)
        arrays: dict[str, np.ndarray] = dict(zip(self.moments, (entry.exp_avg, entry.exp_avg_sq), strict=True))
        if entry.compensation is not None:
            arrays["compensation"] = entry.compensation
        step = torch.tensor(float(entry.step), dtype=torch.float32, device=self.step_place(group, parameter))
        return {"step": step, **{key: laid_out_as(parameter, array) for key, array in arrays.items()}}


class TorchLayout(OwnLayout):
    """torch.optim.AdamW and Adam: biased moments in the parameter's dtype, no compensation."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, optimizer: torch.optim.AdamW | torch.optim.Adam) -> None:
        groups = optimizer.param_groups
        if any(group["amsgrad"] for group in groups):
            raise RefusedError("amsgrad=True keeps a third moment, which penstock's rules do not have; use amsgrad=False.")
        kept = {key for parameter in optimizer.state for key in optimizer.state[parameter]}
        if more := sorted(kept - {"step", *self.moments}):
            raise RefusedError(
                f"optimizer={type(optimizer).__name__} keeps {', '.join(map(repr, more))}, which a file has no place for; only "
                "what Adam keeps has a portable state."
            )
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        rules = {"adamw" if group.get("decoupled_weight_decay", decoupled) else "adam" for group in groups}
        if len(rules) > 1:
            raise RefusedError(
                "decoupled_weight_decay differs between groups, and a file is of one rule; use an optimizer for each."
            )
        (self.rule,) = rules
        for group in groups:
            _betas(group)
            for parameter in group["params"]:
                check_parameter(parameter)

    def require_closed(self, call: str) -> None:
        """torch.optim's step is never open."""

    def check(self, group: Group) -> None:
        """Raise `InvalidArgumentError` for hyperparameters out of range, or that torch.optim does not have."""
        if group["decouple_lr"]:
            raise InvalidArgumentError(
                "the state's decouple_lr=True is penstock's alone; import it with hyperparameters=False."
            )
        hyperparameters(group)

    def initial(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        zeros = {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in self.moments}
        return {"step": torch.zeros(()), **zeros}

    def expected(self, group: Group, parameter: Tensor) -> Expected:
        """The moments may have any dtype: they are rounded after the bias is put back."""
        return Expected(dtype_name(parameter.dtype), tuple(parameter.shape), "none", None, None)

    def betas(self, group: Group) -> Betas:
        return _betas(group)

    def imported(self, group: Group) -> None:
        """torch.optim's moments are biased, and do not depend on betas."""

    def debiased(self, group: Group, parameter: Tensor, moments: Moments, step: int) -> Moments:
        """In the dtypes in which penstock's optimizer of these parameters would keep them."""
        betas = _betas(group)
        return without_bias(moments, betas, step, state_dtypes(dtype_name(parameter.dtype), betas[1]))

    def kept(self, group: Group, name: str, entry: ParameterState) -> ParameterState:
        moments = Moments(entry.exp_avg, entry.exp_avg_sq)
        biased = with_bias(name, moments, _betas(group), entry.step, StateDtypes(entry.dtype, entry.dtype))
        return dataclasses.replace(entry, **biased._asdict())

    def step_place(self, group: Group, parameter: Tensor) -> torch.device:
        return parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")


def float_betas(betas: Sequence[Any]) -> Betas:
    """Return betas, numbers or tensors, as numbers."""
    return float(betas[0]), float(betas[1])


def _betas(group: Mapping[str, Any]) -> Betas:
    """Return the betas of a torch.optim group. Raises `InvalidArgumentError` if nothing can be divided by their bias."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} of the optimizer must be a pair of numbers.")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_number(NAMES[name], float(beta), RANGES[name])
    return float_betas(betas)


def _step(kind: type[Optimizer]) -> Any:
    """The step() of a class as it was written; torch wraps it, for each class anew."""
    return inspect.unwrap(kind.step)


def layout_of(optimizer: Optimizer) -> OwnLayout:
    """Return the layout of this optimizer's state.

    Raises:
        InvalidArgumentError, RefusedError, UnsupportedTensorError: it is one that has no portable state.
    """
    if isinstance(optimizer, ReleasableOptimizer):
        return OwnLayout(optimizer)
    if isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        if not any(_step(type(optimizer)) is _step(known) for known in (torch.optim.AdamW, torch.optim.Adam)):
            raise RefusedError(
                f"optimizer={type(optimizer).__name__} has a step() of its own, which may keep other moments than Adam's. If "
                "it does not, load its state_dict() into torch.optim.AdamW or torch.optim.Adam, and give that."
            )
        return TorchLayout(optimizer)
    raise InvalidArgumentError(
        f"optimizer={type(optimizer).__name__} has no portable state; give one of penstock's, torch.optim.AdamW or "
        "torch.optim.Adam (of a wrapper, the optimizer inside)."
    )
