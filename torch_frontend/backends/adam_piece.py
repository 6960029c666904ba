"""The arithmetic of Adam and its relatives in the eager backend: in place, with the two scratch tensors of a piece.

`core.rules.adam_family` defines what is computed, in the same order; this file only chooses the memory for each result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.codings import EightBit
from ...core.hyperparameters import is_zero
from ...core.rules import Rule, adam_family
from .numbers import UpdateNumbers
from .piece import Piece

LARGEST_SUM = {torch.float32: adam_family.LARGEST[32] ** 2, torch.float64: adam_family.LARGEST[64] ** 2}
"""The largest sum of squares of a gradient, by compute dtype, in which surely no element is above the bound.

On a CPU it is read. On an accelerator, where that would wait, three operations more bound every gradient.
"""


class AdamPiece(Piece):
    """A piece of a tensor that one of them updates."""

    __slots__ = ()

    def load_fields(self) -> None:
        exp_avg, exp_avg_sq = self.fields
        if exp_avg.__class__ is EightBit or exp_avg_sq.__class__ is EightBit:
            super().load_fields()
            return
        dtype = self.dtype
        self.upcast = (
            exp_avg if exp_avg.dtype is dtype else self.upcast_of(exp_avg, 1),
            exp_avg_sq if exp_avg_sq.dtype is dtype else self.upcast_of(exp_avg_sq, 2),
        )

    def accumulate(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None = None) -> None:
        """Compute the moments and store them in the state: `core.rules.adam_family.accumulate`.

        squares: the sum of the gradient's squares is appended here.
        """
        self.load_fields()
        gradient, square, change = self.enter(numbers, first, squares), self.a, self.b
        (exp_avg, exp_avg_sq), (c1, c2) = self.upcast, numbers.corrections
        if first:
            if not numbers.plain:
                self.reset()
            torch.sub(gradient, exp_avg, out=change)
            exp_avg.add_(change.mul_(c1))
            exp_avg_sq.add_(square.sub_(exp_avg_sq).mul_(c2))
        else:
            torch.mul(gradient, c1, out=change)
            exp_avg.add_(change)
            exp_avg_sq.add_(square.mul_(c2))
        stored, stored_sq = self.fields
        if exp_avg is not stored or exp_avg_sq is not stored_sq:
            self.store_fields(self.upcast)

    def enter(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """Put the square of the gradient that enters the moments into `a`, and return that gradient: upcast, or bounded in `b`.

        squares: the sum of the given gradient's squares is appended here.
        """
        gradient = self.gradient
        if numbers.plain and gradient is not None and gradient.dtype is self.dtype:
            self.upcast_gradient = gradient
        else:
            self.prepare(first, squares)
            gradient = self.upcast_gradient
            if not self.squares_are_the_gradients():
                squares = None
        if squares is not None or gradient.is_cpu:
            total = torch.mul(gradient, gradient, out=self.a).sum()
            if squares is not None:
                squares.append(total)
            if gradient.is_cpu and total.item() <= LARGEST_SUM[self.dtype]:
                return gradient
        largest = adam_family.LARGEST[torch.finfo(self.dtype).bits]
        torch.clamp(gradient, -largest, largest, out=self.b)
        self.b.add_(torch.mul(gradient, 0.0, out=self.a))  # NaN where the gradient is infinite
        torch.mul(self.b, self.b, out=self.a)
        return self.b

    def reset(self) -> None:
        """Set moments to zero whose beta is 0: `core.rules.rule.forgotten`."""
        for moment, beta in zip(self.upcast, self.rule.decays(self.settings.hyperparameters), strict=True):
            if is_zero(beta):
                moment.zero_()

    def ratios(self) -> Tensor:
        """Return g*g / max(v, eps^2) in scratch, after `accumulate`: `core.rules.adam_family.mean_square` before the mean."""
        return self._ratios(self.upcast[1])

    def ratios_before(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """Return what `ratios` will be after `accumulate`, without writing the moments. squares: as in `accumulate`."""
        self.load_fields()
        self.enter(numbers, first, squares)
        square, moment, exp_avg_sq, c2 = self.a, self.b, self.upcast[1], numbers.corrections[1]
        current: Any = self.settings.hyperparameters
        if first and is_zero(current.beta2):
            moment.copy_(square.mul_(c2))
        elif first:
            torch.add(exp_avg_sq, square.sub_(exp_avg_sq).mul_(c2), out=moment)
        else:
            torch.add(exp_avg_sq, square.mul_(c2), out=moment)
        return self._ratios(moment)

    def _ratios(self, exp_avg_sq: Tensor) -> Tensor:
        current: Any = self.settings.hyperparameters
        eps = current.eps
        floored = torch.clamp(exp_avg_sq, min=max(eps * eps, adam_family.SMALLEST_NORMAL_FLOAT32), out=self.a)
        return torch.div(self.upcast_gradient, floored, out=floored).mul_(self.upcast_gradient)

    def descend(self, numbers: UpdateNumbers, eta: Tensor) -> None:
        """Store p - eta * (`core.rules.adam_family.direction` + decay*p) with its compensation."""
        step, other, parameter = self.a, self.b, self.load_parameter()
        exp_avg, exp_avg_sq = self.upcast
        torch.sqrt(exp_avg_sq, out=other)
        torch.div(exp_avg, other.add_(numbers.eps), out=step)  # type: ignore[arg-type]
        if numbers.decay is not None:
            step.add_(torch.mul(parameter, numbers.decay, out=other))
        parameter.sub_(step.mul_(eta))
        if parameter is not self.parameter:
            self.store_parameter(parameter)


def piece_class(rule: Rule) -> type[Piece]:
    """Return the class of the pieces of a rule."""
    return AdamPiece if adam_family.is_member(rule) else Piece
