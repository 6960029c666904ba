"""Walks over autograd graphs: which leaves get a gradient from a backward pass."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DEPTH = 4
"""How many levels of closures, partials, attributes and containers are searched for leaves in a function's arguments."""


def reachable(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield every graph node that can be reached from these nodes, once; None among them is left out."""
    seen: set[Any] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


class Graph(NamedTuple):
    """The leaves and nodes of an autograd graph; a `torch.autograd.Function` may run further graphs in its backward.

    leaves: the tensors that get a gradient from backward().
    hidden: the leaves of `hidden_leaves`, of all nodes.
    functions: the class names of the nodes.
    """

    leaves: set[Tensor]
    hidden: set[Tensor]
    functions: set[str]

    @classmethod
    def of(cls, loss: Tensor) -> Graph:
        """Return the graph of a tensor."""
        graph = cls(set(), set(), set())
        for node in reachable([loss.grad_fn]):
            graph.functions.add(type(node).__name__)
            graph.leaves.update(leaf_of(node))
            graph.hidden.update(hidden_leaves(node))
        return graph

    def has(self, function: type[torch.autograd.Function]) -> bool:
        """Whether the graph has a node of this function."""
        return f"{function.__name__}Backward" in self.functions


def leaf_of(node: Any) -> tuple[Tensor, ...]:
    """Return the tensor into whose `.grad` this node accumulates, if it does that."""
    variable = getattr(node, "variable", None)
    return (variable,) if isinstance(variable, Tensor) else ()


def hidden_leaves(node: Any) -> set[Tensor]:
    """Return the leaves that a `torch.autograd.Function` may give gradients to by a graph of its own in its backward.

    They are looked for in the functions and modules that it has kept, as a reentrant checkpoint keeps what it runs again; its
    own inputs are left out.
    """
    kept = getattr(node, "__dict__", None)
    if not kept:
        return set()
    found = {leaf for value in kept.values() if not isinstance(value, Tensor) for leaf in _leaves_in(value, DEPTH)}
    return found.difference(*(leaf_of(following) for following, _ in node.next_functions)) if found else found


def _leaves_in(thing: Any, depth: int) -> Iterator[Tensor]:
    """Yield the leaves that calling `thing` may use: in closures, default arguments, partials, containers and attributes."""
    if isinstance(thing, nn.Module):
        yield from (parameter for parameter in thing.parameters() if parameter.requires_grad)
    elif isinstance(thing, Tensor):
        if thing.requires_grad and thing.is_leaf:
            yield thing
    elif depth > 0:
        for part in _parts(thing):
            yield from _leaves_in(part, depth - 1)


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]  # those not empty
        return [*cells, *(thing.__defaults__ or ())]
    if isinstance(thing, (list, tuple)):
        return thing
    if isinstance(thing, dict):
        return thing.values()
    if callable(thing) and not isinstance(thing, type):
        return getattr(thing, "__dict__", {}).values()
    return ()
