"""Walks over autograd graphs: which leaves get a gradient from a backward pass."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DEPTH = 4
"""How many levels of closures, partials and containers are searched for modules in a checkpointed function."""


def reachable(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield every graph node that can be reached from these nodes, once; None among them is left out."""
    seen: set[Any] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions)


class Graph(NamedTuple):
    """The leaves and nodes of an autograd graph; a `torch.autograd.Function` may run further graphs in its backward.

    leaves: the tensors that get a gradient from backward().
    behind_checkpoints: the parameters of modules found in the functions that reentrant checkpoints run again in backward.
    functions: the class names of the nodes.
    """

    leaves: set[Tensor]
    behind_checkpoints: set[Tensor]
    functions: set[str]

    @classmethod
    def of(cls, loss: Tensor) -> Graph:
        """Return the graph of a tensor."""
        return cls.from_nodes([loss.grad_fn])

    @classmethod
    def from_nodes(cls, nodes: Iterable[Any]) -> Graph:
        """Return the graph that is reachable from these nodes."""
        graph = cls(set(), set(), set())
        for node in reachable(nodes):
            graph.functions.add(type(node).__name__)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                graph.leaves.add(variable)
            for module in _modules_in(getattr(node, "run_function", None), DEPTH):
                graph.behind_checkpoints.update(module.parameters())
        return graph

    def has(self, function: type[torch.autograd.Function]) -> bool:
        """Whether the graph has a node of this function."""
        return f"{function.__name__}Backward" in self.functions


def _modules_in(thing: Any, depth: int) -> list[nn.Module]:
    """Return the modules that calling `thing` may run, found in closures, default arguments, partials and containers."""
    if isinstance(thing, nn.Module):
        return [thing]
    if depth == 0:
        return []
    parts: list[Any] = []
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        parts = [thing.__self__, thing.__func__]
    elif isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]  # those not empty
        parts = [*cells, *(thing.__defaults__ or ())]
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    elif isinstance(thing, dict):
        parts = list(thing.values())
    return [module for part in parts for module in _modules_in(part, depth - 1)]
