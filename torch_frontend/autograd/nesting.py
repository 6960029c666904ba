"""The functions whose backward runs a backward pass of its own, and whether any graph has a node of one."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch.autograd import Function


class NestingFunctions:
    """The `torch.autograd.Function` classes that run a backward pass in their backward, as reentrant checkpoints do.

    They are recognised by their code, in which something called backward is called, or by having run a pass once.
    """

    def __init__(self) -> None:
        self._functions: set[Any] = set()
        self._looked_at: tuple[int, int] | None = None  # number of classes, and the id of the newest

    def __contains__(self, function: Any) -> bool:
        return function in self._functions

    def add(self, functions: set[Any]) -> bool:
        """Add functions that have run a pass; return whether one is new."""
        new = not functions <= self._functions
        self._functions |= functions
        return new

    def have_nodes(self) -> bool:
        """Whether a node of one of them exists, in whatever graph. It costs no walk over a graph.

        Each node refers to its class, and Python counts these references.
        """
        classes = Function.__subclasses__()
        if self._looked_at != (len(classes), id(classes[-1])):
            self._looked_at = len(classes), id(classes[-1])
            self._functions.update(filter(_calls_backward, classes))
        return not _COUNTS or any(_references(function) > _WITHOUT_NODES for function in self._functions)


def _calls_backward(function: Any) -> bool:
    code = getattr(inspect.unwrap(function.backward), "__code__", None)
    return code is not None and "backward" in code.co_names


def _references(function: Any) -> int:
    return sys.getrefcount(function._backward_cls)


class _Unused(Function):
    """What Python counts for this class, it counts for every class without nodes."""


_WITHOUT_NODES = _references(_Unused)
_node: Any = _Unused._backward_cls()
_COUNTS = _references(_Unused) > _WITHOUT_NODES  # not in a Python that counts references in each thread
del _node
