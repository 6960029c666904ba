"""A part of a tensor in the eager backend, and its arithmetic for any rule: the rule's own functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...core import codings, random_bits
from ...core import compensation as compensations
from ...core.codings import EightBit
from ...core.compensation import Stored
from ...core.hyperparameters import is_zero
from ...core.rules import Entered
from ..array_ops import dtype_name, torch_ops
from ..communication.shards import of_whole
from .backend import TensorSlot
from .cpu_codings import GRADIENT, CpuCodings, RandomPart
from .numbers import UpdateNumbers
from .random_words import Randomness


class Piece:
    """A part of a parameter with the same part of its gradient and state, and two scratch tensors of that size.

    parameter, gradient, fields, compensation: as stored; gradient and compensation may be None.
    first_index: of the first element in the whole tensor in row-major order, for the random bits.
    random: the random bits of the whole tensor in this update, by number; the pieces of a tensor share it.
    cpu_codings: reads and writes what is coded; None where `core` does.
    upcast_gradient, upcast: the gradient and the fields in the compute dtype; the stored tensor itself if it has that dtype.
    """

    __slots__ = (
        "a",
        "b",
        "compensation",
        "cpu_codings",
        "dtype",
        "entered",
        "fields",
        "first_index",
        "gradient",
        "parameter",
        "random",
        "rule",
        "settings",
        "slot",
        "upcast",
        "upcast_gradient",
    )  # fmt: skip
    parameter: Tensor
    gradient: Tensor | None
    fields: Sequence[Any]
    compensation: Tensor | None
    first_index: int
    random: dict[int, Randomness]
    upcast_gradient: Any
    upcast: Any
    entered: Entered | None

    def __init__(self, slot: TensorSlot, a: Tensor, b: Tensor, cpu_codings: CpuCodings | None = None) -> None:
        self.slot = weakref.proxy(slot)  # which may keep this piece
        self.rule, self.settings, self.cpu_codings = slot.rule, slot.settings, cpu_codings
        self.a, self.b, self.dtype, self.first_index, self.entered = a, b, a.dtype, 0, None
        self.random = {}

    def __enter__(self) -> None:
        """Free the gradient and the upcast fields at the end of the context."""

    def __exit__(self, *_: object) -> None:
        self.gradient = self.upcast_gradient = self.upcast = self.entered = None

    def load_parameter(self) -> Tensor:
        """Return the compensated parameter in the compute dtype; the parameter itself if it has that dtype."""
        if self.parameter.dtype is self.dtype:
            return self.parameter
        stored = Stored(self.parameter, self.compensation)
        if self.cpu_codings is not None:
            return self.cpu_codings.load(self.slot.compensation, stored)
        return compensations.load(torch_ops, self.slot.compensation, stored)

    def store_parameter(self, parameter: Tensor) -> None:
        """Store the parameter, in the compute dtype, with its compensation; its memory may be overwritten."""
        random, compensation = self.randomness(0), self.slot.compensation
        if self.cpu_codings is not None:
            self.cpu_codings.store(compensation, parameter, Stored(self.parameter, self.compensation), random)
            return
        bits = None if random is None else random.words(parameter)
        stored = compensations.store(torch_ops, compensation, parameter, dtype_name(self.parameter.dtype), bits)
        self.parameter.copy_(stored.parameter)
        if stored.compensation is not None:
            assert self.compensation is not None
            self.compensation.copy_(stored.compensation)

    def randomness(self, number: int) -> RandomPart | None:
        """Return the random bits of the parameter (0) or of the nth field; None where that is rounded to nearest."""
        slot = self.slot
        if number not in slot.random:
            return None
        of = self.random.get(number)
        if of is None:
            place = random_bits.place(slot.random_key, slot.when(number))
            of = self.random[number] = Randomness(place, slot.first_index, slot.parameter.numel(), slot.parameter.device)
        return RandomPart(of, self.first_index)

    def load_fields(self) -> None:
        """Set the upcast fields."""
        self.upcast = [self.load_field(number, field) for number, field in enumerate(self.fields, 1)]

    def load_field(self, number: int, stored: Any) -> Tensor:
        """Return the nth field in the compute dtype; the stored tensor itself if it has that dtype."""
        if isinstance(stored, EightBit):
            if self.cpu_codings is not None:
                return self.cpu_codings.decoded(stored, number)
            return codings.load(torch_ops, stored, dtype_name(self.dtype))
        return stored if stored.dtype is self.dtype else self.upcast_of(stored, number)

    def upcast_of(self, stored: Tensor, number: int) -> Tensor:
        """Return the nth field or the gradient, of another dtype, in the compute dtype."""
        if self.cpu_codings is None or self.dtype is not torch.float32:
            return stored.to(self.dtype)
        return self.cpu_codings.upcast(stored, number)

    def store_fields(self, fields: Sequence[Tensor], unchanged: Sequence[Tensor] = ()) -> None:
        """Store fields in the compute dtype: `core.codings.store`; not those among `unchanged`, which are stored."""
        for number, (stored, new) in enumerate(zip(self.fields, fields, strict=True), 1):
            if any(new is old for old in unchanged):
                continue
            random = self.randomness(number)
            coded = isinstance(stored, EightBit)
            if self.cpu_codings is not None and coded:
                self.cpu_codings.encode(new, stored, random)
            elif self.cpu_codings is not None and random is not None:
                self.cpu_codings.store_bfloat16(new, stored, random)
            elif random is not None or coded:
                kept = codings.store(torch_ops, new, stored, None if random is None else random.words(new))
                for old, coded in zip(tree_leaves(stored), tree_leaves(kept), strict=True):
                    old.copy_(coded)
            elif new is not stored:
                stored.copy_(new)

    def prepare(self, first: bool, squares: list[Tensor] | None) -> None:
        """Set the upcast gradient: `core.update.prepared_gradient`. The given gradient is not changed.

        squares: the sum of the gradient's squares is appended here if maximize or L2 change the gradient.
        """
        gradient, rule, current = self.gradient, self.rule, self.settings.hyperparameters
        assert gradient is not None
        if gradient.dtype is not self.dtype:
            gradient = self.upcast_of(gradient, GRADIENT)
        if rule.l2 or current.maximize:
            if squares is not None:
                squares.append(torch.mul(gradient, gradient, out=self.a).sum())
            if current.maximize:
                gradient = -gradient
            if rule.l2 and first and not is_zero(current.weight_decay):
                gradient = gradient + current.weight_decay * self.load_parameter()
        self.upcast_gradient = gradient

    def squares_are_the_gradients(self) -> bool:
        """Whether the upcast gradient has the gradient's squares; otherwise `prepare` has summed them."""
        return not (self.rule.l2 or self.settings.hyperparameters.maximize)

    def accumulate(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None = None) -> None:
        """Put the gradient into the fields, and store them: `Rule.accumulate`.

        squares: the sum of the gradient's squares is appended here.
        """
        self.load_fields()
        self.prepare(first, squares)
        if squares is not None and self.squares_are_the_gradients():
            squares.append(torch.mul(self.upcast_gradient, self.upcast_gradient, out=self.a).sum())
        rule, current = self.rule, self.settings.hyperparameters
        before = tuple(self.upcast)
        if rule.needs_gradient:  # the stored fields are overwritten before the step reads them
            before = tuple(old.clone() if old is stored else old for old, stored in zip(before, self.fields, strict=True))
        after = rule.accumulate(current, numbers.corrections, before, self.upcast_gradient, torch, first=first)
        self.entered = Entered(before, self.upcast_gradient) if rule.needs_gradient else None
        self.store_fields(after)
        self.upcast = after

    def ratios(self) -> Tensor:
        """Return what a rule that clips takes the mean of, after `accumulate`."""
        raise NotImplementedError

    def ratios_before(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """Return what `ratios` will be after `accumulate`, without writing the fields. squares: as in `accumulate`."""
        raise NotImplementedError

    def descend(self, numbers: UpdateNumbers, eta: Tensor) -> None:
        """Store p - eta * (`Rule.direction` + decay*p) with its compensation."""
        parameter = self.load_parameter()
        current = self.settings.hyperparameters
        step = self.rule.direction(current, numbers.corrections, tuple(self.upcast), self.entered, torch)
        if self.rule.of_matrix is not None:
            step = of_whole(self.slot.shard, step, functools.partial(self.rule.of_matrix, torch_ops, current))
        fields = None if self.rule.after_step is None else tuple(self.upcast)
        self.upcast = self.entered = self.upcast_gradient = None  # storing needs memory, too
        if numbers.decay is not None:
            step = step + numbers.decay * parameter
        if fields is None or self.rule.after_step is None:
            self.store_parameter(parameter - eta * step)
            return
        after, added = self.rule.after_step(numbers.corrections, fields, -(eta * step))
        self.store_fields(after, unchanged=fields)
        self.store_parameter(parameter + added)


def clipped_rate(learning_rate: Tensor, mean_square: Tensor | float) -> Tensor:
    """Return lr / max(1, sqrt(mean_square)): `core.update.clipped_learning_rate`."""
    assert isinstance(mean_square, Tensor)
    return torch.div(learning_rate, mean_square.sqrt().clamp_(min=1.0))


def sum_of(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum of 0-d tensors, 0-d."""
    if not sums:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum()
