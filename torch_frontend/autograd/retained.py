"""Tensors with `retain_grad()`: intermediate results into whose `.grad` backward() adds, each time it passes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_RETAINED = WeakTensorKeyDictionary()


@functools.cache
def note_retained() -> None:
    """Have `Tensor.retain_grad` note its tensor from now on: autograd does not tell which they are."""
    original: Any = Tensor.retain_grad

    @torch.compiler.disable  # traced, it would retain the gradient of a tensor inside the graph
    @functools.wraps(original)
    def retain_grad(self: Tensor) -> None:
        original(self)
        _RETAINED[self] = None

    Tensor.retain_grad = retain_grad  # type: ignore[method-assign]


def retained() -> set[Tensor]:
    """Return the tensors that still exist of those noted."""
    return {tensor for tensor in _RETAINED.keys() if tensor.retains_grad}  # noqa: SIM118 - it has no __iter__ of tensors
