"""The arithmetic of the eager backend: the operations of `core.moments` in the same order, in place, with two scratch tensors.

`core.moments` defines what is computed; this file only chooses the memory for each result.
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
    """A part of a parameter with the same part of its gradient and state, and two scratch tensors of that size.

    parameter, gradient, exp_avg, exp_avg_sq, compensation: as stored; gradient and compensation may be None.
    upcast_gradient, upcast_exp_avg, upcast_exp_avg_sq: in the compute dtype; the stored tensor itself if it has that dtype.
    """

    __slots__ = (
        "a",
        "b",
        "coding",
        "compensation",
        "dtype",
        "exp_avg",
        "exp_avg_sq",
        "gradient",
        "parameter",
        "rule",
        "settings",
        "upcast_exp_avg",
        "upcast_exp_avg_sq",
        "upcast_gradient",
    )  # fmt: skip
    parameter: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None
    upcast_gradient: Any
    upcast_exp_avg: Any
    upcast_exp_avg_sq: Any

    def __init__(self, slot: TensorSlot, a: Tensor, b: Tensor) -> None:
        self.rule, self.settings, self.coding = slot.rule, slot.settings, slot.compensation
        self.a, self.b, self.dtype = a, b, a.dtype

    def __enter__(self) -> None:
        """Free the gradient and the upcast moments at the end of the context."""

    def __exit__(self, *_: object) -> None:
        self.gradient = self.upcast_gradient = self.upcast_exp_avg = self.upcast_exp_avg_sq = None

    def load_parameter(self) -> Tensor:
        """Return the compensated parameter in the compute dtype; the parameter itself if it has that dtype."""
        if self.parameter.dtype is self.dtype:
            return self.parameter
        return compensations.load(torch_ops, self.coding, Stored(self.parameter, self.compensation))

    def load_moments(self) -> None:
        """Set the upcast moments."""
        dtype = self.dtype
        self.upcast_exp_avg = self.exp_avg if self.exp_avg.dtype is dtype else self.exp_avg.to(dtype)
        self.upcast_exp_avg_sq = self.exp_avg_sq if self.exp_avg_sq.dtype is dtype else self.exp_avg_sq.to(dtype)

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

    def accumulate(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None = None) -> None:
        """Compute the moments and store them in the state: `core.moments.first_moments` or `later_moments`.

        squares: the sum of the gradient's squares is appended here.
        """
        self.load_moments()
        if numbers.plain and self.gradient is not None and self.gradient.dtype is self.dtype:
            self.upcast_gradient = self.gradient
        else:
            self.prepare(first, squares)
            squares = squares if self.squares_are_the_gradients() else None
        gradient, change, exp_avg, exp_avg_sq = self.upcast_gradient, self.a, self.upcast_exp_avg, self.upcast_exp_avg_sq
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
        """Set moments to zero whose beta is 0: `core.moments.reset_where_beta_is_zero`."""
        current = self.settings.hyperparameters
        if is_zero(current.beta1):
            self.upcast_exp_avg.zero_()
        if is_zero(current.beta2):
            self.upcast_exp_avg_sq.zero_()

    def squares_are_the_gradients(self) -> bool:
        """Whether the upcast gradient has the gradient's squares; otherwise `prepare` has summed them."""
        return not (self.rule.l2 or self.settings.hyperparameters.maximize)

    def ratios(self) -> Tensor:
        """Return g*g / max(v, eps^2) in scratch, after `accumulate`: `core.moments.mean_square` before the mean."""
        return self._ratios(self.upcast_exp_avg_sq)

    def ratios_before(self, numbers: UpdateNumbers, first: bool, squares: list[Tensor] | None) -> Tensor:
        """Return what `ratios` will be after `accumulate`, without writing the moments. squares: as in `accumulate`."""
        self.load_moments()
        self.prepare(first, squares)
        gradient, square, moment = self.upcast_gradient, self.a, self.b
        exp_avg_sq = self.upcast_exp_avg_sq
        torch.mul(gradient, gradient, out=square)
        if squares is not None and self.squares_are_the_gradients():
            squares.append(square.sum())
        if first and is_zero(self.settings.hyperparameters.beta2):
            moment.copy_(square.mul_(numbers.second))
        elif first:
            torch.add(exp_avg_sq, square.sub_(exp_avg_sq).mul_(numbers.second), out=moment)
        else:
            torch.add(exp_avg_sq, square.mul_(numbers.second), out=moment)
        return self._ratios(moment)

    def _ratios(self, exp_avg_sq: Tensor) -> Tensor:
        eps = self.settings.hyperparameters.eps
        floored = torch.clamp(exp_avg_sq, min=max(eps * eps, SMALLEST_NORMAL_FLOAT32), out=self.a)
        return torch.div(self.upcast_gradient, floored, out=floored).mul_(self.upcast_gradient)

    def descend(self, numbers: UpdateNumbers, eta: Tensor) -> None:
        """Store p - eta * `core.moments.direction` with its compensation."""
        step, other, parameter = self.a, self.b, self.load_parameter()
        torch.sqrt(self.upcast_exp_avg_sq, out=other)
        torch.div(self.upcast_exp_avg, other.add_(numbers.eps), out=step)
        if numbers.decay is not None:
            step.add_(torch.mul(parameter, numbers.decay, out=other))
        parameter.sub_(step.mul_(eta))
        if parameter is self.parameter:
            return
        stored = compensations.store(torch_ops, self.coding, parameter, dtype_name(self.parameter.dtype))
        self.parameter.copy_(stored.parameter)
        if stored.compensation is not None:
            assert self.compensation is not None
            self.compensation.copy_(stored.compensation)


def clipped_rate(learning_rate: Tensor, mean_square: Tensor | float) -> Tensor:
    """Return lr / max(1, sqrt(mean_square)): `core.moments.clipped_learning_rate`."""
    assert isinstance(mean_square, Tensor)
    return torch.div(learning_rate, mean_square.sqrt().clamp_(min=1.0))


def sum_of(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum of 0-d tensors, 0-d."""
    if not sums:
        return torch.zeros(())
    return sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum()
