"""The compiled backend: the functions of `core.update` themselves, through torch.compile, flat and dynamic.

Every tensor is handed over as a vector in the order of memory, so that one graph serves all shapes; every number that
changes while training (lr, betas, decay, the debiased complements) is an element of a small tensor, so that none is
compiled in. What remains (rule, compensation, dtypes, eps, whether a beta is zero, first micro-batch or later) selects the
graph. Calling a graph costs about as much as updating ten thousand elements: step() hands over `BATCH` tensors at a time,
release one.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import update as core_update
from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.moments import Complements, is_zero
from ...core.rules import RULES
from ...core.update import TensorState
from ..array_ops import DTYPES, compiled_ops, dtype_name, torch_ops
from .backend import OverShards, TensorSlot
from .eager import EagerBackend
from .memory_order import along_memory

BATCH = 25
"""Tensors in one call of a graph. Its compilation takes longer with each (about a second); what is left over goes alone."""

KEEP_CASTS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
"""Without this option Inductor deletes casts to a low precision and back, and every kahan compensation would be zero."""

Key = tuple[Any, ...]
Vectors = tuple[Any, ...]  # tensors; None where there is none
Task = tuple[TensorSlot, Vectors]


class CompiledBackend:
    """See `Backend`."""

    name = "compiled"
    one_launch = False

    def __init__(self) -> None:
        self._eager = EagerBackend()

    def update_all(
        self,
        pairs: Sequence[tuple[TensorSlot, Tensor]],
        *,
        grad_scale: Tensor | None = None,
        over_shards: OverShards | None = None,
    ) -> None:
        """See `Backend`."""
        totals: dict[int, Tensor] = {}
        if over_shards is not None:
            here = self._each("measure", pairs, grad_scale, totals)
            whole = over_shards([here[id(slot)] for slot, _ in pairs])
            totals = {id(slot): total for (slot, _), total in zip(pairs, whole, strict=True)}
        self._each("update", pairs, grad_scale, totals)

    def _each(
        self, kind: str, pairs: Sequence[tuple[TensorSlot, Tensor]], grad_scale: Tensor | None, totals: dict[int, Tensor]
    ) -> dict[int, Any]:
        """ "measure" or "update", with these mean squares, if any. The mean squares, by the id of the slot."""
        by_key: dict[Key, list[Task]] = {}
        found: dict[int, Any] = {}
        for slot, gradient in pairs:
            vectors = _vectors(slot, gradient)
            if vectors is not None:
                by_key.setdefault(_key(slot), []).append((slot, vectors))
            elif kind == "measure":
                found[id(slot)] = self._eager.mean_square(slot, gradient, True, grad_scale)
            elif totals:
                self._eager.write(slot, gradient, True, grad_scale, totals[id(slot)])
            else:
                self._eager.update(slot, gradient, first=True, grad_scale=grad_scale)
        for key, alike in by_key.items():
            for batch in _batches(alike):
                given = [totals[id(slot)] for slot, _ in batch] if totals else None
                squares = _run(kind, True, key, batch, grad_scale, given)
                found |= zip((id(slot) for slot, _ in batch), squares, strict=True)
        return found

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        vectors = _vectors(slot, gradient)
        if vectors is None:
            self._eager.update(slot, gradient, first=first, grad_scale=grad_scale)
            return
        _run("update", first, _key(slot), [(slot, vectors)], grad_scale)
        slot.state.pop("mean_square", None)

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        vectors = _vectors(slot, gradient)
        if vectors is None:
            self._eager.accumulate(slot, gradient, first=first, grad_scale=grad_scale)
            return
        slot.state["mean_square"] = _run("accumulate", first, _key(slot), [(slot, vectors)], grad_scale)[0]

    def apply(self, slot: TensorSlot) -> None:
        """See `Backend`."""
        vectors = _vectors(slot, None)
        if vectors is None:
            self._eager.apply(slot)
            return
        _run("apply", False, _key(slot), [(slot, vectors)])
        slot.state.pop("mean_square")


def _batches(alike: list[Task]) -> Iterator[list[Task]]:
    full = len(alike) - len(alike) % BATCH
    for start in range(0, full, BATCH):
        yield alike[start : start + BATCH]
    for task in alike[full:]:
        yield [task]


def _key(slot: TensorSlot) -> Key:
    """What is compiled in: two slots of one key share a graph."""
    dtypes = (slot.parameter.dtype, slot.state["exp_avg"].dtype, slot.state["exp_avg_sq"].dtype)
    current = slot.hyperparameters
    settings = (current.eps, current.maximize, is_zero(current.beta1), is_zero(current.beta2))
    return (slot.rule.name, slot.compensation, *settings, dtypes, slot.parameter.device)


def _run(
    kind: str,
    first: bool,
    key: Key,
    tasks: Sequence[Task],
    grad_scale: Tensor | None = None,
    squares: Sequence[Tensor] | None = None,
) -> list[Tensor | float]:
    """One call of a graph, with the mean squares of whole tensors or else those of earlier micro-batches, if any.

    The summed mean square of each slot comes back.
    """
    lead = tasks[0][0]
    if squares is None and (kind == "apply" or not first):
        squares = [slot.state["mean_square"] for slot, _ in tasks]
    totals = None if squares is None else _numbers(lead, [list(squares)])[0]
    factor = None if grad_scale is None else _numbers(lead, [[grad_scale]])[0, 0]
    graph = _compiled(kind, first, factor is not None, totals is not None, *key, len(tasks))
    return graph([vectors for _, vectors in tasks], _numbers(lead, [_scalars(slot) for slot, _ in tasks]), totals, factor)


def _vectors(slot: TensorSlot, gradient: Tensor | None) -> Vectors | None:
    """parameter, gradient, exp_avg, exp_avg_sq, compensation; an absent one is None.

    None for what the eager backend does, with the same arithmetic: the compiler would make a special graph for each of the
    sizes 0 and 1, and for every layout that is no vector.
    """
    named = {"parameter": slot.parameter, "gradient": gradient}
    named |= {name: slot.state.get(name) for name in ("exp_avg", "exp_avg_sq", "compensation")}
    if slot.parameter.numel() < 2:
        return None
    present = along_memory({name: tensor for name, tensor in named.items() if tensor is not None})
    return None if present is None else tuple(present.get(name) for name in named)


def _scalars(slot: TensorSlot) -> list[Any]:
    """c1, c2, lr, decay."""
    decay = slot.hyperparameters.weight_decay if slot.rule.l2 else slot.hyperparameters.decay_rate
    return [*slot.complements, slot.hyperparameters.learning_rate, decay]


def _numbers(slot: TensorSlot, rows: list[list[Any]]) -> Tensor:
    """Rows of numbers or 0-d tensors as one tensor in the compute dtype, without waiting for the device."""
    dtype, device = DTYPES[compute_dtype(dtype_name(slot.parameter.dtype))], slot.parameter.device
    if not any(isinstance(value, Tensor) for row in rows for value in row):
        return torch.tensor(rows, dtype=dtype, device=device)
    cast = functools.partial(torch.as_tensor, dtype=dtype, device=device)
    return torch.stack([torch.stack([cast(value).reshape(()) for value in row]) for row in rows])


@functools.cache
def _compiled(
    kind: str,
    first: bool,
    scaled: bool,
    totalled: bool,
    rule_name: str,
    compensation: str,
    eps: float,
    maximize: bool,
    beta1_is_zero: bool,
    beta2_is_zero: bool,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    count: int,
) -> Callable[..., Any]:
    """One graph. `scaled`, `dtypes`, `device` and `count` only keep it apart: each is compiled once; the compiler counts."""
    rule = RULES[rule_name]
    kahan = compensation == "kahan"
    ops = compiled_ops if kahan and not _keeps_casts(dtypes[0], device.type) else torch_ops
    beta1, beta2 = 0.0 if beta1_is_zero else 0.5, 0.0 if beta2_is_zero else 0.5  # the complements say the rest

    def steps(vectors: list[Vectors], scalars: Tensor, totals: Tensor | None, factor: Tensor | None) -> list[Tensor | float]:
        return [
            step(tensors, scalars[row], 0.0 if totals is None else totals[row], factor) for row, tensors in enumerate(vectors)
        ]

    def step(tensors: Vectors, scalars: Tensor, total: Tensor | float, factor: Tensor | None) -> Tensor | float:
        parameter, gradient, exp_avg, exp_avg_sq, kept = tensors
        if factor is not None:
            gradient = gradient.to(factor.dtype) * factor
        complements = Complements(scalars[0], scalars[1])
        current = Hyperparameters(scalars[2], beta1, beta2, eps, scalars[3], maximize=maximize)
        state = TensorState(exp_avg, exp_avg_sq, kept, total)
        new = parameter
        if kind == "measure":
            return core_update.measure(ops, rule, current, complements, compensation, parameter, gradient, state)
        if kind == "apply":
            new, after = core_update.apply(ops, rule, current, compensation, parameter, state)
        elif kind == "accumulate":
            after = core_update.accumulate(
                ops, rule, current, complements, compensation, parameter, gradient, state, first=first
            )
        else:
            given = (complements, compensation, parameter, gradient, state)
            whole = total if first and totalled else None
            new, after = core_update.update(ops, rule, current, *given, first=first, mean_square=whole)
        if kind != "accumulate":
            parameter.copy_(new)
        if kind != "accumulate" and kept is not None and after.compensation is not None:
            kept.copy_(after.compensation)
        if kind != "apply":
            exp_avg.copy_(after.exp_avg)
            exp_avg_sq.copy_(after.exp_avg_sq)
        return after.mean_square

    # torch.compile keeps graphs with the code object, and gives up after a number of them: each needs a code of its own.
    code = steps.__code__.replace(co_name=f"{rule_name}_{kind}")
    own = types.FunctionType(code, steps.__globals__, code.co_name, steps.__defaults__, steps.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True, options=KEEP_CASTS if kahan else None)


@functools.cache
def _keeps_casts(dtype: torch.dtype, device_type: str) -> bool:
    """Whether the compiler, when asked to, keeps a cast to this dtype and back: found out by compiling, once a process."""
    probe = torch.compile(lambda x: x - torch_ops.round_to(x, dtype_name(dtype)), fullgraph=True, options=KEEP_CASTS)
    return bool(probe(torch.full((8,), 1 + 2.0**-12, device=device_type)).all())


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
