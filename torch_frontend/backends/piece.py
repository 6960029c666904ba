"""A part of a tensor in the eager backend, and its arithmetic for any rule: the rule's own functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import codings, random_bits
from ...core import compensation as compensations
from ...core.codings import EightBit
from ...core.compensation import Stored
from ...core.hyperparameters import is_zero
from ...core.rules import Entered
from ..array_ops import dtype_name, torch_ops
from ..communication.shards import of_whole
from .backend import TensorSlot
from .numbers import UpdateNumbers


class Piece:
    """A part of a parameter with the same part of its gradient and state, and two scratch tensors of that size.

    parameter, gradient, fields, compensation: as stored; gradient and compensation may be None.
    first_index: of the first element in the whole tensor in row-major order, for the random bits.
    upcast_gradient, upcast: the gradient and the fields in the compute dtype; the stored tensor itself if it has that dtype.
    """

    __slots__ = (
        "a",
        "b",
        "coding",
        "compensation",
        "dtype",
        "entered",
        "fields",
        "first_index",
        "gradient",
        "parameter",
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
    upcast_gradient: Any
    upcast: Any
    entered: Entered | None

    def __init__(self, slot: TensorSlot, a: Tensor, b: Tensor) -> None:
        self.slot = weakref.proxy(slot)  # which may keep this piece
        self.rule, self.settings, self.coding = slot.rule, slot.settings, slot.compensation
        self.a, self.b, self.dtype, self.first_index, self.entered = a, b, a.dtype, 0, None

    def __enter__(self) -> None:
        """Free the gradient and the upcast fields at the end of the context."""

    def __exit__(self, *_: object) -> None:
        self.gradient = self.upcast_gradient = self.upcast = self.entered = None

    def load_parameter(self) -> Tensor:
        """Return the compensated parameter in the compute dtype; the parameter itself if it has that dtype."""
        if self.parameter.dtype is self.dtype:
            return self.parameter
        return compensations.load(torch_ops, self.coding, Stored(self.parameter, self.compensation))

    def store_parameter(self, parameter: Tensor) -> None:
        """Store the parameter, in the compute dtype, with its compensation."""
        stored = compensations.store(torch_ops, self.coding, parameter, dtype_name(self.parameter.dtype), self.bits(0))
        self.parameter.copy_(stored.parameter)
        if stored.compensation is not None:
            assert self.compensation is not None
            self.compensation.copy_(stored.compensation)

    def bits(self, number: int) -> Tensor | None:
        """Return the random bits of the parameter (0) or of the nth field; None where that is rounded to nearest."""
        slot = self.slot
        if number not in slot.random:
            return None
        assert slot.random_key is not None
        return _bits(slot.random_key, slot.when(number), self.first_index, self.parameter)

    def load_fields(self) -> None:
        """Set the upcast fields."""
        name = dtype_name(self.dtype)
        self.upcast = [codings.load(torch_ops, field, name) for field in self.fields]

    def store_fields(self, fields: Sequence[Tensor], unchanged: Sequence[Tensor] = ()) -> None:
        """Store fields in the compute dtype: `core.codings.store`; not those among `unchanged`, which are stored."""
        for number, (stored, new) in enumerate(zip(self.fields, fields, strict=True), 1):
            if any(new is old for old in unchanged):
                continue
            if isinstance(stored, EightBit):
                codes, scale = codings.store(torch_ops, new, stored, self.bits(number))
                stored.codes.copy_(codes)
                stored.scale.copy_(scale)
            elif number in self.slot.random:
                stored.copy_(codings.store(torch_ops, new, stored, self.bits(number)))
            elif new is not stored:
                stored.copy_(new)

    def prepare(self, first: bool, squares: list[Tensor] | None) -> None:
        """Set the upcast gradient: `core.update.prepared_gradient`. The given gradient is not changed.

        squares: the sum of the gradient's squares is appended here if maximize or L2 change the gradient.
        """
        gradient, rule, current = self.gradient, self.rule, self.settings.hyperparameters
        assert gradient is not None
        if gradient.dtype is not self.dtype:
            gradient = gradient.to(self.dtype)
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


def _bits(key: int, when: Any, start: int, part: Tensor) -> Tensor:
    """Return the random bits of a part of a tensor, whose elements have the indices from `start` on, row by row."""
    end = start + part.numel()
    low: Any = torch.arange(start, end, device=part.device).view(part.shape)
    high: Any = start >> 32
    if high != (end - 1) >> 32:
        high = low >> 32
    found: Tensor = random_bits.bits(random_bits.stream(key, when, high), low if end <= 2**32 else low & random_bits.WORD)
    return found


def clipped_rate(learning_rate: Tensor, mean_square: Tensor | float) -> Tensor:
    """Return lr / max(1, sqrt(mean_square)): `core.update.clipped_learning_rate`."""
    assert isinstance(mean_square, Tensor)
    return torch.div(learning_rate, mean_square.sqrt().clamp_(min=1.0))


def sum_of(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum of 0-d tensors, 0-d."""
    if not sums:
        return torch.zeros(())
    return sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum()
