"""The arithmetic of the eager backend: the operations of `core.moments` in the same order, in place, with two scratch tensors.

`core.moments` says what is computed; here it only says where it is put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import compensation as compensations
from ...core.compensation import Stored
from ...core.moments import SMALLEST_NORMAL_FLOAT32, is_zero
from ..array_ops import dtype_name, torch_ops
from .backend import TensorSlot
from .numbers import UpdateNumbers


class Piece:
    """The same part of a parameter, its gradient and its state, with scratch of that size.

    parameter, gradient, exp_avg, exp_avg_sq, kept: as they are stored; gradient and kept (the compensation) may be None.
    wide_gradient, wide_exp_avg, wide_exp_avg_sq: in the compute dtype; themselves where they have it.
    """

    __slots__ = (
        "a", "b", "dtype", "exp_avg", "exp_avg_sq", "gradient", "kept", "parameter", "slot",
        "wide_exp_avg", "wide_exp_avg_sq", "wide_gradient",
    )  # fmt: skip
    parameter: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    kept: Tensor | None
    wide_gradient: Any
    wide_exp_avg: Any
    wide_exp_avg_sq: Any

    def __init__(self, slot: TensorSlot, a: Tensor, b: Tensor) -> None:
        self.slot = slot
        self.a, self.b, self.dtype = a, b, a.dtype

    def __enter__(self) -> None:
        """Between updates it keeps no gradient and no moment in another dtype alive."""

    def __exit__(self, *_: object) -> None:
        self.gradient = self.wide_gradient = self.wide_exp_avg = self.wide_exp_avg_sq = None

    def load_parameter(self) -> Tensor:
        """The parameter with its compensation in the compute dtype; itself where it has that."""
        if self.parameter.dtype is self.dtype:
            return self.parameter
        return compensations.load(torch_ops, self.slot.compensation, Stored(self.parameter, self.kept))

    def load_moments(self) -> None:
        """The moments in the compute dtype; themselves where they have it."""
        dtype = self.dtype
        self.wide_exp_avg = self.exp_avg if self.exp_avg.dtype is dtype else self.exp_avg.to(dtype)
        self.wide_exp_avg_sq = self.exp_avg_sq if self.exp_avg_sq.dtype is dtype else self.exp_avg_sq.to(dtype)

    def prepare(self, first: bool, squares: list[Tensor] | None) -> None:
        """`core.update.prepared_gradient`; never the caller's gradient changed. squares: as in `accumulate`."""
        gradient, rule, current = self.gradient, self.slot.rule, self.slot.settings.hyperparameters
        assert gradient is not None
        if gradient.dtype is not self.dtype:
            gradient = gradient.to(self.dtype)
        if rule.l2 or current.maximize:  # their squares are another gradient's
            if squares is not None:
                squares.append(torch.mul(gradient, gradient, out=self.a).sum())
            if current.maximize:
                gradient = -gradient
            if rule.l2 and first and not is_zero(current.weight_decay):
                gradient = gradient + current.weight_decay * self.load_parameter()
        self.wide_gradient = gradient

    def accumulate(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None = None) -> None:
        """`core.moments.first_moments` or `later_moments`: the moments in the compute dtype, and in the state.

        squares: gets the sum of the gradient's squares.
        """
        self.load_moments()
        if numbers.plain and self.gradient is not None and self.gradient.dtype is self.dtype:
            self.wide_gradient = self.gradient
        else:
            self.prepare(first, squares)
            squares = squares if self.squares_are_the_gradients() else None
        gradient, change, exp_avg, exp_avg_sq = self.wide_gradient, self.a, self.wide_exp_avg, self.wide_exp_avg_sq
        if first:
            if not numbers.plain:
                self.reset()
            torch.sub(gradient, exp_avg, out=change)
            exp_avg.add_(change.mul_(numbers.first))
            torch.mul(gradient, gradient, out=change)
            if squares is not None:
                squares.append(change.sum())
            exp_avg_sq.add_(change.sub_(exp_avg_sq).mul_(numbers.second))
        else:
            torch.mul(gradient, numbers.first, out=change)
            exp_avg.add_(change)
            torch.mul(gradient, gradient, out=change)
            if squares is not None:
                squares.append(change.sum())
            exp_avg_sq.add_(change.mul_(numbers.second))
        if exp_avg is not self.exp_avg:
            self.exp_avg.copy_(exp_avg)
        if exp_avg_sq is not self.exp_avg_sq:
            self.exp_avg_sq.copy_(exp_avg_sq)

    def reset(self) -> None:
        """`core.moments.reset_where_beta_is_zero`: what an update takes of moments whose beta is 0."""
        current = self.slot.settings.hyperparameters
        if is_zero(current.beta1):
            self.wide_exp_avg.zero_()
        if is_zero(current.beta2):
            self.wide_exp_avg_sq.zero_()

    def squares_are_the_gradients(self) -> bool:
        """Whether the square of what enters the moments is that of the gradient; `prepare` has measured it otherwise."""
        return not (self.slot.rule.l2 or self.slot.settings.hyperparameters.maximize)

    def ratios(self) -> Tensor:
        """What `core.moments.mean_square` is the mean of, in scratch, once the moments are accumulated."""
        return self._ratios(self.wide_exp_avg_sq)

    def ratios_before(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """The same from a second moment that is not written."""
        self.load_moments()
        self.prepare(first, squares)
        gradient, square, moment = self.wide_gradient, self.a, self.b
        exp_avg_sq = self.wide_exp_avg_sq
        torch.mul(gradient, gradient, out=square)
        if squares is not None and self.squares_are_the_gradients():
            squares.append(square.sum())
        if first and is_zero(self.slot.settings.hyperparameters.beta2):
            moment.copy_(square.mul_(numbers.second))
        elif first:
            torch.add(exp_avg_sq, square.sub_(exp_avg_sq).mul_(numbers.second), out=moment)
        else:
            torch.add(exp_avg_sq, square.mul_(numbers.second), out=moment)
        return self._ratios(moment)

    def _ratios(self, exp_avg_sq: Tensor) -> Tensor:
        """g*g / max(v, eps^2), in scratch."""
        eps = self.slot.settings.hyperparameters.eps
        floored = torch.clamp(exp_avg_sq, min=max(eps * eps, SMALLEST_NORMAL_FLOAT32), out=self.a)
        return torch.div(self.wide_gradient, floored, out=floored).mul_(self.wide_gradient)

    def descend(self, numbers: UpdateNumbers, eta: Tensor) -> None:
        """p - eta*`core.moments.direction`, stored with its compensation."""
        step, other, parameter = self.a, self.b, self.load_parameter()
        torch.sqrt(self.wide_exp_avg_sq, out=other)
        torch.div(self.wide_exp_avg, other.add_(numbers.eps), out=step)
        if numbers.decay is not None:
            step.add_(torch.mul(parameter, numbers.decay, out=other))
        parameter.sub_(step.mul_(eta))
        if parameter is self.parameter:
            return
        stored = compensations.store(torch_ops, self.slot.compensation, parameter, dtype_name(self.parameter.dtype))
        self.parameter.copy_(stored.parameter)
        if stored.compensation is not None:
            assert self.kept is not None
            self.kept.copy_(stored.compensation)


def clipped_rate(learning_rate: Tensor, mean_square: Tensor | float) -> Tensor:
    """`core.moments.clipped_learning_rate`, 0-d."""
    assert isinstance(mean_square, Tensor)
    return torch.div(learning_rate, mean_square.sqrt().clamp_(min=1.0))


def sum_of(sums: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors, 0-d."""
    if not sums:
        return torch.zeros(())
    return sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum()
