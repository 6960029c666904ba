"""Layouts of optimizer state: penstock's as in a portable state, torch.optim's with biased moments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core import compensation as compensations
from ...core.codings import state_dtypes
from ...core.errors import InvalidArgumentError, RefusedError
from ...core.hyperparameters import DECAY, check_number
from ...core.portable.bias import Decays, Fields, under_decays, with_bias, without_bias
from ...core.portable.match import Expected
from ...core.portable.state import ParameterState, scale_name
from ...core.rules import ADAM, ADAMW, Rule
from ..array_ops import dtype_name
from ..backends.backend import scale_key, state_keys
from ..changing_betas import BETAS_OF_MOMENTS, decays_of, set_betas_of_moments
from ..checks import check_group, check_parameter
from ..groups import NAMES, Group, field_dtypes, hyperparameters, rule_of
from ..releasable import ReleasableOptimizer
from ..state import RANDOM_KEY, initial_state
from .arrays import laid_out_as, rows_like

MOST_STEPS = 2**24
"""torch counts steps in float32: the next one would not be counted."""


class OwnLayout:
    """The optimizers of this package: the fields of their rules, and a compensation."""

    def __init__(self, optimizer: ReleasableOptimizer) -> None:
        self._optimizer = optimizer

    def rule(self, group: Group) -> Rule:
        """The rule of a group."""
        return rule_of(group)

    def keys(self, group: Group) -> tuple[str, ...]:
        """The keys of the rule's fields in the state of a parameter of the group."""
        return state_keys(self.rule(group))

    def require_closed(self, call: str) -> None:
        """Raise `RefusedError` in the middle of a step under release."""
        if (release := self._optimizer.release) is not None:
            release._require_closed(call)

    def check(self, group: Group) -> None:
        """Raise if a group cannot be optimized so; as at its construction."""
        check_group(group)

    def initial(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that was never updated."""
        return initial_state(group, parameter, hyperparameters(group))

    def expected(self, group: Group, parameter: Tensor) -> Expected:
        """What is kept for a parameter."""
        name, rule = dtype_name(parameter.dtype), self.rule(group)
        dtypes = field_dtypes(group, parameter, hyperparameters(group))
        kept = {field.name: dtype for field, dtype in zip(rule.fields, dtypes, strict=True)}
        compensated = compensations.resolve(group["compensation"], name)
        by_beta = [field.name for field in rule.fields if field.of_squares and group["state_dtype"] is None]
        return Expected(rule, name, tuple(parameter.shape), compensated, kept, may_be_float32=by_beta)

    def debiased(self, group: Group, parameter: Tensor, fields: Fields, step: int) -> Fields:
        """Fields as the portable state has them, of those that are kept: debiased by the group's present betas."""
        return under_decays(fields, step, as_floats(group[BETAS_OF_MOMENTS]), self.decays(group))

    def decays(self, group: Group) -> Decays:
        """The betas that fields in a portable state are debiased by. It synchronises if they are tensors on a device."""
        return as_floats(decays_of(group))

    def imported(self, group: Group) -> None:
        """Called when all parameters of a group have new states."""
        set_betas_of_moments(group, decays_of(group))

    def kept(self, group: Group, name: str, entry: ParameterState) -> ParameterState:
        """The entry as it is kept. Raises `InvalidArgumentError` where that is not possible."""
        return entry

    def step_place(self, group: Group, parameter: Tensor) -> torch.device:
        """Where the number of updates is counted."""
        return parameter.device if group["capturable"] else torch.device("cpu")

    def new_state(self, group: Group, name: str, parameter: Tensor, entry: ParameterState) -> dict[str, Any]:
        """The state of a parameter in `optimizer.state`.

        Raises:
            InvalidArgumentError: the optimizer cannot keep it.
        """
        if entry.step > MOST_STEPS:
            raise InvalidArgumentError(f"step of {name!r} is {entry.step}; torch's optimizers count to {MOST_STEPS}.")
        entry = self.kept(group, name, entry)
        arrays: dict[str, np.ndarray] = {}
        scales: dict[str, np.ndarray] = {}
        for key, field in zip(self.keys(group), self.rule(group).fields, strict=True):
            arrays[key] = entry.fields[field.name]
            if scale_name(field.name) in entry.fields:
                scales[scale_key(key)] = entry.fields[scale_name(field.name)]
        if entry.compensation is not None:
            arrays["compensation"] = entry.compensation
        step = torch.tensor(float(entry.step), dtype=torch.float32, device=self.step_place(group, parameter))
        state: dict[str, Any] = {"step": step, **{key: laid_out_as(parameter, array) for key, array in arrays.items()}}
        state |= {key: rows_like(parameter, array) for key, array in scales.items()}
        if entry.random_keys:  # of layers that are one tensor here, the first's
            state[RANDOM_KEY] = entry.random_keys[0]
        return state


class TorchLayout(OwnLayout):
    """torch.optim.AdamW and Adam: biased moments in the parameter's dtype, no compensation."""

    def __init__(self, optimizer: torch.optim.AdamW | torch.optim.Adam) -> None:
        groups = optimizer.param_groups
        if any(group["amsgrad"] for group in groups):
            raise RefusedError("amsgrad=True keeps a third moment, which penstock's rules do not have; use amsgrad=False.")
        kept = {key for parameter in optimizer.state for key in optimizer.state[parameter]}
        if more := sorted(kept - {"step", *(field.name for field in ADAM.fields)}):
            raise RefusedError(
                f"optimizer={type(optimizer).__name__} keeps {', '.join(map(repr, more))}, which a file has no place for; only "
                "what Adam keeps has a portable state."
            )
        self._is_adamw = isinstance(optimizer, torch.optim.AdamW)
        for group in groups:
            _betas(group)
            for parameter in group["params"]:
                check_parameter(parameter)

    def rule(self, group: Group) -> Rule:
        return ADAMW if group.get("decoupled_weight_decay", self._is_adamw) else ADAM

    def keys(self, group: Group) -> tuple[str, ...]:
        return tuple(field.name for field in self.rule(group).fields)

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
        zeros = {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in self.keys(group)}
        return {"step": torch.zeros((), dtype=torch.float32), **zeros}

    def expected(self, group: Group, parameter: Tensor) -> Expected:
        """The moments may have any dtype: they are rounded after the bias is put back."""
        dtypes = dict.fromkeys(self.keys(group))
        return Expected(self.rule(group), dtype_name(parameter.dtype), tuple(parameter.shape), "none", dtypes)

    def decays(self, group: Group) -> Decays:
        return _betas(group)

    def imported(self, group: Group) -> None:
        """torch.optim's moments are biased, and do not depend on betas."""

    def debiased(self, group: Group, parameter: Tensor, fields: Fields, step: int) -> Fields:
        """In the dtypes in which penstock's optimizer of these parameters would keep them."""
        betas = _betas(group)
        return without_bias(fields, betas, step, state_dtypes(ADAM.fields, dtype_name(parameter.dtype), betas))

    def kept(self, group: Group, name: str, entry: ParameterState) -> ParameterState:
        biased = with_bias(ADAM, name, entry.fields, _betas(group), entry.step, [entry.dtype] * len(ADAM.fields))
        return dataclasses.replace(entry, fields=biased)

    def step_place(self, group: Group, parameter: Tensor) -> torch.device:
        return parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")


def as_floats(betas: Iterable[Any]) -> Decays:
    """Return betas, numbers or tensors or None, as numbers or None."""
    return tuple(None if beta is None else float(beta) for beta in betas)


def _betas(group: Mapping[str, Any]) -> Decays:
    """Return the betas of a torch.optim group. Raises `InvalidArgumentError` if nothing can be divided by their bias."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} of the optimizer must be a pair of numbers.")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_number(NAMES[name], float(beta), DECAY)
    return as_floats(betas)


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
