"""What the graph of a loss shows: whose gradients a walk through it would give."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DEPTH = 4
"""How far modules are looked for in what a checkpointed function closes over."""


class Graph(NamedTuple):
    """What can be seen of a graph; a `torch.autograd.Function` may hide more behind it.

    leaves: the tensors that a backward() would give a gradient.
    behind_checkpoints: the parameters of modules that reentrant checkpoints run again in backward, as far as these show them.
    functions: the names of the kinds of its nodes.
    """

    leaves: set[Tensor]
    behind_checkpoints: set[Tensor]
    functions: set[str]

    @classmethod
    def of(cls, loss: Tensor) -> Graph:
        """That of a tensor."""
        return cls.from_nodes([loss.grad_fn])

    @classmethod
    def from_nodes(cls, nodes: Iterable[Any]) -> Graph:
        """Walk what is reached from these nodes."""
        graph = cls(set(), set(), set())
        seen: set[Any] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            graph.functions.add(type(node).__name__)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                graph.leaves.add(variable)
            for module in _modules_in(getattr(node, "run_function", None), DEPTH):
                graph.behind_checkpoints.update(module.parameters())
            stack.extend(following for following, _ in node.next_functions)
        return graph

    def has(self, function: type[torch.autograd.Function]) -> bool:
        """Whether a node of this kind is in it."""
        return f"{function.__name__}Backward" in self.functions


def _modules_in(thing: Any, depth: int) -> list[nn.Module]:
    """The modules that calling `thing` can call, as far as it shows them."""
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
        parts = [*map(_content, thing.__closure__ or ()), *(thing.__defaults__ or ())]
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    elif isinstance(thing, dict):
        parts = list(thing.values())
    return [module for part in parts for module in _modules_in(part, depth - 1)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
