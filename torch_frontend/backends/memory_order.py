"""One-dimensional views of tensors in memory order, for every dense memory format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def along_memory(tensors: Sequence[Tensor | None]) -> list[Any] | None:
    """Return 1-d views in memory order, or None unless all tensors are dense with the same order of dimensions.

    Args:
        tensors: all of one shape; the first determines the order of dimensions. None in place of a tensor stays None.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(map(Tensor.is_contiguous, given)):
        order = sorted(range(given[0].dim()), key=given[0].stride, reverse=True)
        tensors = [None if tensor is None else tensor.permute(order) for tensor in tensors]
        if not all(tensor.permute(order).is_contiguous() for tensor in given):
            return None
    # Detached last, so that torch.compile sees plain vectors and not their bases. They share the parameter's version
    # counter, so that autograd still notices a parameter that was changed after it was saved for backward.
    return [None if tensor is None else tensor.view(-1).detach() for tensor in tensors]
