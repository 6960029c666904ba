"""The compiled backend: the functions of `core.update` themselves, through torch.compile, flat and dynamic.

Every tensor is handed over as a vector in the order of memory, so that one graph serves all shapes; every number that
changes while training (lr, betas, decay, the debiased complements) is an element of a small tensor, so that none is
compiled in. What remains (rule, compensation, dtypes, eps, first micro-batch or later) selects the graph.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core import update as core_update
from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.moments import Complements
from ...core.rules import RULES
from ...core.update import TensorState
from ..array_ops import DTYPES, dtype_name, torch_ops
from .backend import TensorSlot
from .eager import EagerBackend
from .memory_order import along_memory

Graph = Callable[..., Any]


class CompiledBackend:
    """See `Backend`."""

    name = "compiled"

    def __init__(self) -> None:
        self._eager = EagerBackend()

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """See `Backend`."""
        if _too_small(slot):
            self._eager.update(slot, gradient, first=first)
            return
        total = slot.state.pop("mean_square", None)
        _graph("update", slot, first)(*_vectors(slot, gradient), _scalars(slot), _as_tensor(slot, total))

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """See `Backend`."""
        if _too_small(slot):
            self._eager.accumulate(slot, gradient, first=first)
            return
        total = _as_tensor(slot, slot.state.get("mean_square"))
        graph = _graph("accumulate", slot, first)
        slot.state["mean_square"] = graph(*_vectors(slot, gradient), _scalars(slot), total)

    def apply(self, slot: TensorSlot) -> None:
        """See `Backend`."""
        if _too_small(slot):
            self._eager.apply(slot)
            return
        total = _as_tensor(slot, slot.state.pop("mean_square"))
        _graph("apply", slot, first=False)(*_vectors(slot, None), _scalars(slot), total)


def _too_small(slot: TensorSlot) -> bool:
    """The compiler makes special graphs for the sizes 0 and 1; the eager backend gives the same bits at once."""
    return slot.parameter.numel() < 2


def _vectors(slot: TensorSlot, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    """parameter, gradient, exp_avg, exp_avg_sq, compensation; an absent one is None."""
    named = {"parameter": slot.parameter, "gradient": gradient}
    named |= {name: slot.state.get(name) for name in ("exp_avg", "exp_avg_sq", "compensation")}
    present = along_memory({name: tensor for name, tensor in named.items() if tensor is not None})
    return tuple(present.get(name) for name in named)


def _scalars(slot: TensorSlot) -> Tensor:
    """[c1, c2, lr, decay] in the compute dtype, on the parameter's device."""
    decay = slot.hyperparameters.weight_decay if slot.rule.l2 else slot.hyperparameters.decay_rate
    values = [*slot.complements, slot.hyperparameters.learning_rate, decay]
    place = {"dtype": DTYPES[compute_dtype(dtype_name(slot.parameter.dtype))], "device": slot.parameter.device}
    if any(isinstance(value, Tensor) for value in values):  # on the device already: no step waits for it
        return torch.stack([torch.as_tensor(value, **place).reshape(()) for value in values])
    return torch.tensor(values, **place)


def _as_tensor(slot: TensorSlot, total: Tensor | float | None) -> Tensor:
    dtype = DTYPES[compute_dtype(dtype_name(slot.parameter.dtype))]
    return torch.as_tensor(0.0 if total is None else total, dtype=dtype, device=slot.parameter.device)


def _graph(kind: str, slot: TensorSlot, first: bool) -> Graph:
    dtypes = tuple(str(slot.state[name].dtype) for name in ("exp_avg", "exp_avg_sq"))
    eps, maximize = slot.hyperparameters.eps, slot.hyperparameters.maximize
    return _compiled(kind, slot.rule.name, slot.compensation, first, eps, maximize, str(slot.parameter.dtype), dtypes)


@functools.cache
def _compiled(
    kind: str,
    rule_name: str,
    compensation: str,
    first: bool,
    eps: float,
    maximize: bool,
    parameter_dtype: str,
    state_dtypes: tuple[str, ...],
) -> Graph:
    """One graph. The dtypes are part of the key so that each graph is compiled once: the compiler counts recompilations."""
    rule = RULES[rule_name]

    def step(
        parameter: Tensor,
        gradient: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        kept: Tensor | None,
        scalars: Tensor,
        total: Tensor,
    ) -> Tensor | float:
        complements = Complements(scalars[0], scalars[1])
        current = Hyperparameters(scalars[2], 0.0, 0.0, eps, scalars[3], maximize=maximize)
        state = TensorState(exp_avg, exp_avg_sq, kept, total)
        if kind == "apply":
            new, after = core_update.apply(torch_ops, rule, current, compensation, parameter, state)
        elif kind == "accumulate":
            new = parameter
            after = core_update.accumulate(
                torch_ops, rule, current, complements, compensation, parameter, gradient, state, first=first
            )
        else:
            new, after = core_update.update(
                torch_ops, rule, current, complements, compensation, parameter, gradient, state, first=first
            )
        if kind != "accumulate":
            parameter.copy_(new)
            if kept is not None:
                kept.copy_(after.compensation)
        if kind != "apply":
            exp_avg.copy_(after.exp_avg)
            exp_avg_sq.copy_(after.exp_avg_sq)
        return after.mean_square

    # torch.compile keeps its graphs with the code object, and gives up after a number of them: each needs a code of its own.
    code = step.__code__.replace(co_name=f"{rule_name}_{kind}")
    own = types.FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)
    # Without this option Inductor deletes casts to a low precision and back, and every kahan compensation would be zero.
    return torch.compile(own, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})


@functools.cache
def why_not(device_type: str) -> str | None:
    """Why nothing can be compiled for this device, or None: found out by compiling, once a process."""
    probe = torch.compile(lambda x: torch.sqrt(x) + math.e, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it imports its compiler
        try:
            probe(torch.ones(8, device=device_type))
        except Exception as error:  # whatever a compiler, a driver or a full disk may raise
            return " ".join(str(error).split()[:40])
    return None
