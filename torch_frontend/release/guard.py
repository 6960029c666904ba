"""`guard(loss)`: an unmodified loss.backward() runs a pass that only measures, then the pass that updates.

Clipping the global norm needs the norm of the whole gradient before the first update, and loss scaling needs to know that
all of it is finite. Keeping all gradients would give up what release saves; walking the graph twice keeps one at a time:
the first walk measures each gradient and frees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...core.errors import Refused
from ..communication.shards import is_sharded
from .backward_pass import is_compiled
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


_will_run = getattr(torch._C, "_will_engine_execute_node", None)  # not public: without it, what follows is refused as it comes

_GUARDED: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
"""The nodes of guarded losses, and whose they are."""


def guarded(loss: Tensor, run: Callable[[Tensor, Tensor], None], release: object) -> Tensor:
    """A tensor of the loss's value whose backward() calls `run(loss, seed)`, for this release."""
    if Graph.of(loss).has(_TwoPasses):
        raise Refused("the loss is guarded already; one release guards a loss, others use accumulation='hold' with max_norm.")
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    result: Tensor = _TwoPasses.apply(anchor, [loss], run)
    _GUARDED[result.grad_fn] = release
    return result


def require_whole(release: object, parameters: Iterable[Tensor]) -> None:
    """Raise `Refused` if the backward pass that is running, of a guarded loss, brings more than that loss.

    Args:
        release: whose guard it is.
        parameters: that are released. (FSDP2 computes gradients of others than those that it shards.)
    """
    if _will_run is None or is_compiled():
        return
    others = [node for node, owner in list(_GUARDED.items()) if owner is release and node.loss is not None]
    edges = (get_gradient_edge(parameter) for parameter in parameters if not is_sharded(parameter))
    if any(_will_run(node) for node in others) or any(_will_run(edge.node) for edge in edges):
        raise Refused(
            "this backward() is of more than one guarded loss, as release.guard(loss) + regulariser is, or the sum of two "
            "guarded ones: the norm would be of a part of the gradient. Guard all of it: "
            "release.guard(loss + regulariser).backward()."
        )


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
