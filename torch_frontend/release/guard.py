"""`guard(loss)`: an unmodified loss.backward() runs a pass that only measures, then the pass that updates.

Clipping the global norm needs the norm of the whole gradient before the first update, and loss scaling needs to know that
all of it is finite. Keeping all gradients would give up what release saves; walking the graph twice keeps one at a time:
the first walk measures each gradient and frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.errors import Refused
from .graph import Graph


class _TwoPasses(torch.autograd.Function):
    """The loss itself, with a backward that hands over to `run`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: list[Tensor], run: Callable[[Tensor, Tensor], None]) -> Tensor:
        """The value of the loss. It comes in a list so that autograd does not walk into it: `run` does, twice."""
        ctx.loss, ctx.run = loss[0], run
        return loss[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Any) -> tuple[Tensor, None, None]:
        """Both passes, from the seed that backward() came with."""
        loss, ctx.loss = ctx.loss, None
        if loss is None:
            raise Refused("backward() was called twice on a guarded loss; compute the loss again, and guard it.")
        ctx.run(loss, seeds[0])
        return torch.zeros((), device=loss.device), None, None  # the anchor's: compiled autograd may not take None for it


def guarded(loss: Tensor, run: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A tensor of the loss's value whose backward() calls `run(loss, seed)`."""
    if Graph.of(loss).has(_TwoPasses):
        raise Refused("the loss is guarded already; one release guards a loss, others use accumulation='hold' with max_norm.")
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _TwoPasses.apply(anchor, [loss], run)


class SetAside:
    """The gradients of some leaves, set aside while a pass runs that is not to add to them."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._gradients = {leaf: leaf.grad for leaf in leaves}
        for leaf in self._gradients:
            leaf.grad = None

    def restore(self, *, add: bool = False) -> None:
        """Put them back; with `add`, as if the pass had added to them."""
        for leaf, gradient in self._gradients.items():
            if not add or leaf.grad is None:
                leaf.grad = gradient
            elif gradient is not None:
                leaf.grad = gradient + leaf.grad
