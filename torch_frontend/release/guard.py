"""`guard(loss)`: an unmodified loss.backward() runs a pass that only measures, then the pass that updates.

Global-norm clipping needs the norm of the whole gradient before the first update. Keeping all gradients would give up what
release saves; walking the graph twice keeps one at a time: the first walk takes each gradient's norm and frees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.errors import Refused


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


def leaves_of(loss: Tensor) -> set[Tensor]:
    """The leaf tensors that a backward() of `loss` would give a gradient, as far as its graph shows them."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.add(variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


@contextlib.contextmanager
def without_gradients(leaves: set[Tensor]) -> Iterator[None]:
    """What is added to the gradients of `leaves` in this context is forgotten."""
    saved = {leaf: leaf.grad for leaf in leaves}
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved.items():
            leaf.grad = gradient


def guarded(loss: Tensor, run: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A tensor of the loss's value whose backward() calls `run(loss, seed)`."""
    if type(loss.grad_fn).__name__.startswith(_TwoPasses.__name__):
        raise Refused("the loss is guarded already; one release guards a loss, others use accumulation='hold' with max_norm.")
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _TwoPasses.apply(anchor, [loss], run)
