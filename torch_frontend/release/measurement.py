"""Norms and finiteness of the gradients of one step, and the first few gradients themselves."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from ..clipping import gradient_norm, is_finite
from ..communication.shards import sum_over_shards


class Measurement:
    """Takes gradients one by one; nothing waits for the device.

    Args:
        judge: look at the elements; otherwise every gradient counts as finite.
        keep_bytes: of gradient that may be kept.
    """

    def __init__(self, *, judge: bool = False, keep_bytes: int = 0) -> None:
        self._judge = judge
        self._budget = keep_bytes
        self._norms: dict[Tensor, Tensor] = {}
        self._finite: dict[Tensor, Tensor] = {}
        self.kept: dict[Tensor, None] = {}  # in the order in which they came

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._norms

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose gradient was taken, in the order in which they came."""
        return list(self._norms)

    def take(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Measure a gradient; True if it is to be kept, because it fits into what is left of keep_bytes."""
        norm = self._norms[parameter] = gradient_norm(gradient)
        if self._judge:
            self._finite[parameter] = is_finite(gradient, norm)
        nbytes = gradient.untyped_storage().nbytes()
        if not 0 < nbytes <= self._budget:
            return False
        self._budget -= nbytes
        self.kept[parameter] = None
        return True

    def norm(self, order: Iterable[Tensor]) -> Tensor:
        """The global norm, 0-d, float64; summed in the given order, so that it does not depend on who came first."""
        parameters = [parameter for parameter in order if parameter in self._norms]
        if not parameters:
            return torch.zeros((), dtype=torch.float64)
        device = self._norms[parameters[0]].device
        squares = torch.stack([self._norms[parameter].to(device) for parameter in parameters]).square()
        return torch.stack(sum_over_shards(parameters, squares.unbind())).sum().sqrt()

    @functools.cached_property
    def finite(self) -> bool:
        """Whether every element is finite, on every process; asked once everything was taken.

        Waits for the device if there was something to judge.
        """
        if not self._finite:
            return True
        device = next(iter(self._finite.values())).device
        bad = (~torch.stack([finite.to(device) for finite in self._finite.values()])).float()
        return not bool(torch.stack(sum_over_shards(list(self._finite), bad.unbind())).sum())
