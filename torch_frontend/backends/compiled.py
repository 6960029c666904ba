"""The compiled backend: the functions of `core.update` through torch.compile, on vectors of dynamic length.

Every tensor is passed as a vector in memory order, so that one graph serves all shapes. Every number that changes during
training (lr, betas, decay, the bias-corrected 1 - beta) is an element of a small tensor, so that none is a constant of the
graph. The rest (rule, compensation, dtypes, eps, whether a beta is zero, first micro-batch or later) selects the graph.
Calling a graph costs about as much as updating ten thousand elements: smaller tensors are updated eagerly, with the same
arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...core import random_bits
from ...core import update as core_update
from ...core.codings import EightBit
from ...core.codings.eight_bit import BLOCK
from ...core.hyperparameters import DECAY, Hyperparameters, is_zero
from ...core.rules import RULES
from ...core.update import TensorState
from ..array_ops import compiled_ops, int32_remainder_ops, torch_ops
from .backend import TensorSlot, scale_key
from .compiler import KEEP_CASTS, keeps_casts, skip_vector_isa_search
from .eager import EagerBackend
from .memory_order import along_memory
from .piece import sum_of

PIECE, PIECE_WITH_UPCAST = 2**22, 2**20
"""Largest number of elements in one call, which bounds the temporaries of a graph; of one whose remainders are upcast first."""

Vectors = tuple[Any, ...]  # tensors, or None for those that are absent


class CompiledBackend(EagerBackend):
    """Updates large tensors with graphs, small ones as `EagerBackend` does."""

    name = "compiled"

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """Add the gradient to the moments and step; its squares are summed in the same graph."""
        pieces = list(_pieces(slot, gradient, self.small))
        if not pieces:
            return super().update(slot, gradient, first=first, measure=measure)
        total = None if first or not slot.rule.clips_update else slot.state["mean_square"]
        if len(pieces) > 1 and slot.rule.clips_update:
            total = self.mean_square(slot, gradient, first)
            results = [_run("write", slot, first, piece, total, measure) for piece in pieces]
        else:
            results = [_run("update", slot, first, piece, total, measure) for piece in pieces]
        slot.close()
        return sum_of([squares for squares, _ in results if squares is not None]) if measure else None

    def write(self, slot: TensorSlot, gradient: Tensor, first: bool, total: Tensor) -> None:
        pieces = list(_pieces(slot, gradient, self.small))
        if not pieces:
            super().write(slot, gradient, first, total)
        for piece in pieces:
            _run("write", slot, first, piece, total)

    def mean_square(self, slot: TensorSlot, gradient: Tensor, first: bool, squares: list[Tensor] | None = None) -> Tensor:
        pieces = list(_pieces(slot, gradient, self.small))
        if not pieces:
            return super().mean_square(slot, gradient, first, squares)
        sums = [_run("measure", slot, first, piece)[1] * piece[0].numel() for piece in pieces]
        return self._total(slot, gradient, sums, first)

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        pieces = list(_pieces(slot, gradient, self.small))
        if not pieces:
            super().accumulate(slot, gradient, first=first)
            return
        sums = [_run("accumulate", slot, first, piece)[1] * piece[0].numel() for piece in pieces]
        slot.keep_open(self._total(slot, gradient, sums, first) if slot.rule.clips_update else 0.0)

    def apply(self, slot: TensorSlot) -> None:
        pieces = list(_pieces(slot, None, self.small))
        if not pieces:
            super().apply(slot)
            return
        total = slot.state["mean_square"] if slot.rule.clips_update else None
        for piece in pieces:
            _run("apply", slot, False, piece, total)
        slot.close()


def _pieces(slot: TensorSlot, gradient: Tensor | None, small: int) -> Iterator[Vectors]:
    """Yield (parameter, gradient, compensation, *fields) piece by piece, None for those that are absent.

    Yields nothing for tensors that are updated eagerly: small ones, those whose rule needs the whole matrix, those without a
    common dense layout, those whose random bits have another order than their memory, and those with 8-bit blocks that end with
    a row.
    """
    parameter, state = slot.parameter, slot.state
    if slot.rule.of_matrix is not None or parameter.numel() <= small or (slot.random and not parameter.is_contiguous()):
        return
    if slot.coded and (not parameter.is_contiguous() or math.prod(parameter.shape[1:]) % BLOCK):
        return
    vectors = along_memory([parameter, gradient, state.get("compensation"), *map(state.get, slot.keys)])
    if vectors is None:
        return
    scales = [state.get(scale_key(key)) for key in slot.keys] if slot.coded else [None] * len(slot.keys)
    most = PIECE_WITH_UPCAST if _upcasts_remainder(slot) else PIECE
    for start in range(0, parameter.numel(), most):
        parts = vectors
        if parameter.numel() > most:
            parts = [None if vector is None else vector[start : start + most].detach() for vector in vectors]
        if slot.coded:
            parts = [None if vector is None else vector.view(-1, BLOCK).detach() for vector in parts]
            blocks = slice(start // BLOCK, (start + most) // BLOCK)
            pairs = zip(parts[3:], scales, strict=True)
            parts[3:] = [codes if s is None else EightBit(codes, s.view(-1, 1)[blocks].detach()) for codes, s in pairs]
        yield tuple(parts)


def _run(
    kind: str,
    slot: TensorSlot,
    first: bool,
    piece: Vectors,
    total: Tensor | float | None = None,
    measured: bool = False,
) -> tuple[Tensor | None, Any]:
    """Run a graph; return the sum of the gradient's squares (None without `measured`) and, where it is only measured or
    accumulated, the mean square of the piece.

    total: the mean square of the whole tensor for "write", otherwise that of earlier micro-batches.
    """
    parameter = slot.parameter
    chosen = kind, first, measured, slot.rule.name, slot.compensation, slot.random, slot.settings.derived(_constants)
    graph = _compiled(*chosen, (parameter.dtype, *slot.dtypes), parameter.device)
    if total is not None:
        total = torch.as_tensor(total, dtype=slot.compute_dtype, device=slot.parameter.device)
    stored = piece[2]
    if is_upcast := _upcasts_remainder(slot):
        piece = (*piece[:2], stored.to(torch.int32), *piece[3:])
    random = _random(slot, piece[0].storage_offset() - parameter.storage_offset()) if slot.random else None
    squares, mean_square, _ = graph((piece, slot.vector(), total, random))
    if is_upcast and kind not in ("measure", "accumulate"):
        stored.copy_(piece[2])
    return squares, mean_square


def _upcasts_remainder(slot: TensorSlot) -> bool:
    """Whether the remainder is int32 in a graph: Inductor's C++ does not vectorise a loop that reads or writes int16."""
    return slot.compensation == "split" and slot.parameter.is_cpu


class Graph:
    """A compiled function of one tuple: vectors of any length, scalars, a mean square or None, random bits or None.

    Args:
        compiled: from torch.compile.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled: Any = compiled
        self._program: Any = None  # what torch compiles ahead of time: its call takes half the host time
        self._is_new = True

    def __call__(self, given: tuple[Vectors, Tensor, Tensor | None, Tensor | None]) -> tuple[Tensor | None, Any, Any]:
        if self._is_new:
            self._is_new = False
            for vector in tree_leaves(given[0]):
                if vector is not None:
                    torch._dynamo.maybe_mark_dynamic(vector, 0)
            if hasattr(self._compiled, "aot_compile") and not _caches_are_off():
                from torch._dynamo.exc import RestartAnalysis  # here the compiler is imported already

                try:
                    self._program = self._compiled.aot_compile(((given,), {}))
                    self._program.disable_guard_check()  # checked below, where something else can be done
                except RestartAnalysis:  # as of float64 scalars: torch.compile starts again, this does not
                    self._program = None
        program = self._compiled
        if self._program is not None and self._program.guard_check(given):
            program = self._program
        found: tuple[Tensor | None, Any, Any] = program(given)
        return found


def _caches_are_off() -> bool:
    """Whether TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 is set: torch then refuses to compile ahead of time."""
    from torch._inductor import config

    return bool(getattr(config, "force_disable_caches", False))


def _random(slot: TensorSlot, start: int) -> Tensor:
    """Return what a piece's random bits are made of, int32, 1-d: the low and the high word of its first element's index, and
    the place of each of what is rounded stochastically.

    start: of the piece in the parameter.
    """
    start += slot.first_index
    index = start & random_bits.LOW, start >> random_bits.LOW_BITS
    places = [random_bits.place(slot.random_key, slot.when(number)) for number in slot.random]
    if slot.capturable:
        device = slot.parameter.device
        return torch.stack([torch.as_tensor(word, device=device) for word in (*index, *places)]).to(torch.int32)
    words = torch.tensor((*index, *places), device="cpu").to(torch.int32)
    return words.to(slot.parameter.device, non_blocking=True)


def _constants(current: Hyperparameters) -> tuple[tuple[str, Any], ...]:
    """Return the hyperparameters that are compiled in. Of a number in [0, 1) it is whether it is zero: corrections have it."""
    changing = {"learning_rate", "weight_decay", "max_lr", "decouple_lr"}
    names = [field.name for field in dataclasses.fields(current) if field.name not in changing]
    values = {name: getattr(current, name) for name in names}
    decays = [name for name, allowed in current.RANGES.items() if allowed is DECAY]
    return tuple((name, (0.0 if is_zero(value) else 0.5) if name in decays else value) for name, value in values.items())


@functools.cache
def _compiled(
    kind: str,
    first: bool,
    measured: bool,
    rule_name: str,
    compensation: str,
    random_numbers: tuple[int, ...],
    constants: tuple[tuple[str, Any], ...],
    dtypes: tuple[Any, ...],
    device: torch.device,
) -> Graph:
    """Return one graph.

    `dtypes` and `device` are part of the cache key, so that each graph is compiled once.
    """
    if device.type == "cpu":
        skip_vector_isa_search()
    rule = RULES[rule_name]
    unclipped = dataclasses.replace(rule, mean_square=None)
    kahan = compensation == "kahan"
    ops = compiled_ops if kahan and not keeps_casts(dtypes[0], device.type) else torch_ops
    if compensation == "split" and device.type == "cpu":
        ops = int32_remainder_ops

    def step(given: tuple[Vectors, Tensor, Tensor | None, Tensor | None]) -> tuple[Tensor | None, Any, Any]:
        (parameter, gradient, stored, *fields), scalars, total, random = given
        words: dict[int, Tensor] = {}
        streams: tuple[random_bits.Stream, ...] = ()
        if random is not None:
            low, high, *places = random.unbind()
            index = low + torch.arange(parameter.numel(), dtype=torch.int32, device=parameter.device).view(parameter.shape)
            upper = high + ((index if index.dim() == 1 else index[:, :1]) >> random_bits.LOW_BITS)  # the same in a block
            streams = tuple(random_bits.stream(place, upper) for place in places)
            for number, stream in zip(random_numbers, streams, strict=True):
                words[number] = random_bits.bits(stream, index & random_bits.LOW)

        def bits(number: int) -> Tensor | None:
            return words.get(number)

        *corrections, learning_rate, decay = scalars.unbind()
        current = rule.hyperparameters(learning_rate=learning_rate, weight_decay=decay, **dict(constants))
        state = TensorState(tuple(fields), stored, 0.0 if total is None else total)
        arrays = (corrections, compensation, parameter, gradient, state)
        squares = gradient.to(scalars.dtype).square().sum() if measured else None
        new = parameter
        if kind == "apply":
            new, after = core_update.apply(ops, rule, current, corrections, compensation, parameter, state, bits=bits)
        elif kind in ("update", "write") and rule.clips_update:
            whole: Any = total
            if kind == "update":
                whole = core_update.accumulate(ops, rule, current, *arrays, first=first, bits=bits).mean_square
            eta = core_update.clipped_learning_rate(learning_rate, whole, torch)
            clipped = rule.hyperparameters(learning_rate=eta, weight_decay=decay, **dict(constants))
            new, after = core_update.update(ops, unclipped, clipped, *arrays, first=first, bits=bits)
            # Were eta not an output, Inductor would compute it again for every 16 elements.
            after = TensorState(after.fields, after.compensation, eta)
        elif kind in ("update", "write"):
            new, after = core_update.update(ops, rule, current, *arrays, first=first, bits=bits)
        else:
            after = core_update.accumulate(ops, rule, current, *arrays, first=first, bits=bits)
            if kind == "measure":
                return squares, after.mean_square, streams
        if kind != "accumulate":
            parameter.copy_(new)
            if stored is not None and after.compensation is not None:
                stored.copy_(after.compensation)
        if kind != "apply" or rule.after_step is not None:
            for field, new_field in zip(tree_leaves(fields), tree_leaves(after.fields), strict=True):
                field.copy_(new_field)
        return squares, after.mean_square, streams  # as eta

    # torch.compile caches graphs by code object and stops compiling after a number of them: each graph gets its own. Under a
    # name of its own: a number that differs from that of a function of the same name would become an input.
    code = step.__code__.replace(co_name=f"{rule_name}_{kind}_{next(_NUMBERS)}")
    own = types.FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)
    options: dict[str, Any] = {"size_asserts": False, **(KEEP_CASTS if kahan else {})}  # the guards compare the sizes
    if _FILTERS_GUARDS:
        options["guard_filter_fn"] = _guards_of_tensors
    return Graph(torch.compile(own, fullgraph=True, options=options))


_NUMBERS = itertools.count()
_FILTERS_GUARDS = hasattr(torch.compiler, "keep_tensor_guards_unsafe")


def _guards_of_tensors(guards: Sequence[Any]) -> list[bool]:
    """Select what is checked before a graph is used: tensors, shapes, and PyTorch's modes.

    All else that a graph depends on is in its key, or never changes. To check these 300 numbers and functions at each call
    takes longer than to update ten thousand elements.
    """
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") or not guard.name for guard in guards]
