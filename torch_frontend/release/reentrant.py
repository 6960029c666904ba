"""Reentrant checkpointing: a gradient that comes in parts is noticed at its first part.

`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` runs a backward pass of its own for every checkpointed call. A
layer that is called several times then gets its gradient in as many parts, and the hook runs at each. The first part looks
like the whole gradient; but the graph that is left to be walked shows that the layer is still to come.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

DEPTH = 4
"""How far modules are looked for in what a checkpointed function closes over."""


class StillToCome:
    """The parameters whose gradients come again in the backward pass that is running."""

    def __init__(self) -> None:
        self._node: Any = None
        self._parameters: set[Tensor] = set()

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether more of this gradient comes, as far as the graph shows it; always False outside a checkpoint's own pass."""
        node = _running_checkpoint()
        if node is not self._node:
            self._node, self._parameters = node, set() if node is None else _reached_from(node)
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


def _reached_from(node: Any) -> set[Tensor]:
    found: set[Tensor] = set()
    seen: set[Any] = set()
    stack = [following for following, _ in node.next_functions]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.add(variable)
        for module in _modules_in(getattr(node, "run_function", None), DEPTH):
            found.update(module.parameters())
        stack.extend(following for following, _ in node.next_functions)
    return found


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
