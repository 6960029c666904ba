"""`guard(loss)`: an unmodified loss.backward() runs a pass that only measures, then the pass that updates.

Global-norm clipping needs the norm of the whole gradient before the first update. Keeping all gradients would give up what
release saves; walking the graph twice keeps one at a time: the first walk takes each gradient's norm and frees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import Refused


class _TwoPasses(torch.autograd.Function):
    """The loss itself, with a backward that hands over to `run`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: list[Tensor], run: Callable[[Tensor, Tensor], None]) -> Tensor:
        """The value of the loss. It comes in a list so that autograd does not walk into it: `run` does, twice."""
        ctx.loss, ctx.run = loss[0], run
        return loss[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *seeds: Any) -> tuple[None, None, None]:
        """Both passes, from the seed that backward() came with."""
        loss, ctx.loss = ctx.loss, None
        if loss is None:
            raise Refused("backward() was called twice on a guarded loss; compute the loss again, and guard it.")
        ctx.run(loss, seeds[0])
        return None, None, None


def guarded(loss: Tensor, run: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A tensor of the loss's value whose backward() calls `run(loss, seed)`."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _TwoPasses.apply(anchor, [loss], run)
