"""Reentrant checkpointing: a gradient that comes in parts is noticed at its first part.

`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` runs a backward pass of its own for every checkpointed call. A
layer that is called several times then gets its gradient in as many parts, and the hook runs at each. The first part looks
like the whole gradient; but the graph that is left to be walked shows that the layer is still to come.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from .graph import Graph


class StillToCome:
    """The parameters whose gradients come again in the backward pass that is running."""

    def __init__(self) -> None:
        self._node: Any = None
        self._parameters: set[Tensor] = set()

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether more of this gradient comes, as far as the graph shows it; always False outside a checkpoint's own pass."""
        node = _running_checkpoint()
        if node is not self._node:
            self._node, self._parameters = node, set()
            if node is not None:
                ahead = Graph.from_nodes(following for following, _ in node.next_functions)
                self._parameters = ahead.leaves | ahead.behind_checkpoints
        return parameter in self._parameters

    def forget(self) -> None:
        """Keep no graph alive."""
        self._node = None
        self._parameters = set()


def _running_checkpoint() -> Any:
    """The node of the graph in whose backward we are; of nested checkpoints the outermost, from which all the rest follows."""
    node = None
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            node = frame.f_locals.get("ctx", node)
        frame = frame.f_back  # type: ignore[assignment]
    return node
