"""What `guard` does in backward(): a pass that measures the gradients, then the pass that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import Refused
from ..clipping import gradient_norm, total_norm
from ..groups import check_gradient
from .guard import leaves_of, without_gradients

if TYPE_CHECKING:
    from .release import Release


class Measurement:
    """The norms of the gradients of one pass, and whether all of their elements are finite. Nothing waits for the device.

    Args:
        judge: look at the elements; otherwise every gradient counts as finite.
    """

    def __init__(self, *, judge: bool) -> None:
        self._judge = judge
        self._norms: dict[Tensor, Tensor] = {}
        self._finite: list[Tensor] = []

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """Measure one gradient."""
        check_gradient(parameter, gradient)
        self._norms[parameter] = gradient_norm(gradient)
        if self._judge:
            self._finite.append(torch.isfinite(gradient).all())

    def norm(self, order: Iterable[Tensor], sum_over_shards: Callable[..., list[Tensor]]) -> Tensor:
        """The global norm, 0-d, float64; summed in the given order, so that it does not depend on who came first."""
        parameters = [parameter for parameter in order if parameter in self._norms]
        squares = sum_over_shards(parameters, [self._norms[parameter].square() for parameter in parameters])
        return total_norm([square.sqrt() for square in squares])

    def finite(self) -> bool:
        """Waits for the device where there was something to judge."""
        return all(bool(finite) for finite in self._finite)


def two_passes(release: Release, loss: Tensor, seed: Tensor) -> None:
    """The backward of a guarded loss."""
    hooks = release.hooks
    for parameter in hooks.parameters:
        if parameter.grad is not None:
            raise Refused(
                f"{hooks.describe(parameter)} has a gradient from an earlier backward, which the measuring pass would mix "
                "up with this one. Call optimizer.zero_grad() first."
            )
    foreign = leaves_of(loss) | set(() if hooks.model is None else hooks.model.parameters())
    foreign -= set(hooks.parameters)
    hooks.check_ownership(foreign)
    with release.measuring() as measured, without_gradients(foreign):  # nothing is added to what others hold
        torch.autograd.backward(loss, seed, retain_graph=True)
    for parameter in hooks.parameters:
        if parameter.grad is not None:  # no hook freed it
            parameter.grad = None
            raise hooks.lost(parameter)
    with release.updating(measured) as usable:
        if usable:
            torch.autograd.backward(loss, seed)
