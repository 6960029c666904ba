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


def still_to_come() -> set[Tensor]:
    """The parameters whose gradients come again after the pass that is running, a checkpoint's, as far as the graph shows."""
    node = _running_checkpoint()
    if node is None:
        return set()
    ahead = Graph.from_nodes(following for following, _ in node.next_functions)
    return ahead.leaves | ahead.behind_checkpoints


def _running_checkpoint() -> Any:
    """The node of the graph in whose backward we are; of nested checkpoints the outermost, from which all the rest follows."""
    node = None
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            node = frame.f_locals.get("ctx", node)
        frame = frame.f_back  # type: ignore[assignment]
    return node
