"""Reentrant checkpointing: detects before the first part of a gradient is used that it is not the whole one.

`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` runs a backward pass of its own for every checkpointed call. A
layer that is called several times gets its gradient in several parts, and the hook runs at each. The first part looks like
the whole gradient, and only the graph of the outer pass tells that more will come. torch gives no access to the running
passes, so their graphs are found in the frames of the calls that run them: only so can a wrong update be refused before it
is made.
"""

from __future__ import annotations

import collections
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph import hidden_leaves, leaf_of, reachable
from .nesting import NestingFunctions


class PartialGradients:
    """Finds the parameters whose gradient comes in several parts in one backward.

    Each graph is walked once, and none where no function runs a pass inside another one.

    Attributes:
        all_begun: every function of the outermost graph that runs a pass has begun to.
        in_another: the outermost pass is not the one of the call before.
    """

    all_begun = in_another = False

    def __init__(self) -> None:
        self._nesting = NestingFunctions()
        self._graphs: list[_PassGraph] = []  # of the running passes; kept so that their nodes can be recognised

    def find(self, *, nested: bool) -> set[Tensor]:
        """Return the parameters of which the running passes deliver several parts.

        Args:
            nested: the running pass was started inside another one.
        """
        if not self._nesting.have_nodes() and not nested:
            self.in_another = False
            return set()
        passes = list(_running_passes())
        if self._nesting.add({_function(node) for node, _ in passes if node is not None}):
            self.forget()
        graphs = [self._graph_of(node, roots) for node, roots in passes]
        self.in_another = bool(self._graphs and graphs) and graphs[-1] is not self._graphs[-1]
        self._graphs = graphs if nested or any(graph.to_begin for graph in graphs) else []
        if nested and graphs:
            graphs[-1].to_begin.discard(passes[-1][0])
            self.all_begun = not graphs[-1].to_begin
        return set().union(*(graph.in_parts for graph in graphs))

    def forget(self) -> None:
        """Forget the graphs."""
        self._graphs = []

    def _graph_of(self, node: Any, roots: list[Any]) -> _PassGraph:
        for graph in self._graphs:
            if node in graph.nodes or not graph.nodes.isdisjoint(roots):
                return graph
        nodes = _graph_with(node, roots)
        parts = collections.Counter(
            leaf for x in nodes for leaf in (hidden_leaves(x) if _function(x) in self._nesting else leaf_of(x))
        )
        in_parts = {leaf for leaf, count in parts.items() if count > 1}
        return _PassGraph(nodes, in_parts, {x for x in nodes if _function(x) in self._nesting})


def _function(node: Any) -> Any:
    """Return the `torch.autograd.Function` of a node, or None for a node of torch's own."""
    return getattr(type(node), "_forward_cls", None)


class _PassGraph(NamedTuple):
    """The graph of a running pass.

    in_parts: the leaves to which more than one node gives a gradient.
    to_begin: the nodes that have still to run a pass of their own.
    """

    nodes: set[Any]
    in_parts: set[Tensor]
    to_begin: set[Any]


def _running_passes() -> Iterator[tuple[Any, list[Any]]]:
    """Yield each running pass, from the innermost: the function whose backward runs the next one, and the roots of its graph.

    The function of the innermost pass is None, even if its backward calls the hooks of parameters itself, as FSDP2's does. The
    roots of a pass that another thread has started, as on an accelerator, are not known: an empty list.
    """
    node, inside = None, False
    for frame, _ in traceback.walk_stack(sys._getframe()):
        roots = _roots(frame)
        if roots:
            yield node, roots
            node, inside = None, True
        elif (
            inside and frame.f_code.co_name.startswith("apply") and frame.f_globals.get("__name__") == "torch.autograd.function"
        ):
            node = frame.f_locals.get("self", node)
    if node is not None:
        yield node, []


def _roots(frame: FrameType) -> list[Any]:
    """Return the nodes that backward() starts from, if this is the frame of its call; otherwise an empty list."""
    if frame.f_code is not torch.autograd.backward.__code__:
        return []
    tensors = frame.f_locals["tensors"]
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [node for x in tensors if (node := x.grad_fn if isinstance(x, Tensor) else getattr(x, "node", None)) is not None]


def _graph_with(node: Any, roots: list[Any]) -> set[Any]:
    """Return all nodes of the graph with these roots; if they are not known, of the running graph that has this node."""
    if roots:
        return set(reachable(roots))
    for outer in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(outer):
            nodes = set(reachable(_roots(frame)))
            if node in nodes:
                return nodes
    return set(reachable([node]))
