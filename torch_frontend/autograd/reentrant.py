"""Reentrant checkpointing: detects at the first part of a gradient that further parts will follow.

`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` runs a backward pass of its own for every checkpointed call. A
layer that is called several times gets its gradient in several parts, and the hook runs at each. The first part looks like
the whole gradient, but the rest of the outer graph contains the layer again. torch gives no access to the outer pass, so
its node is found in the frame of the checkpoint's backward: only so can a wrong update be refused before it is made.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from .graph import Graph


def still_to_come() -> set[Tensor]:
    """Return the parameters that get a further part of their gradient after the running pass of a reentrant checkpoint."""
    node = _running_checkpoint()
    if node is None:
        return set()
    rest = Graph.from_nodes(following for following, _ in node.next_functions)
    return rest.leaves | rest.behind_checkpoints


def _running_checkpoint() -> Any:
    """Return the node of the outermost reentrant checkpoint whose backward is running, or None."""
    node = None
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is CheckpointFunction.backward.__code__:
            node = frame.f_locals.get("ctx", node)
    return node
