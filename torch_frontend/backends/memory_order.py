"""Tensors seen as vectors in the order of memory, so that a layout costs nothing and changes nothing."""

from __future__ import annotations

from torch import Tensor


def along_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One-dimensional views in the order of memory, where all tensors are dense and laid out alike; else as they are.

    Args:
        tensors: of one shape; "parameter" decides the order.
    """
    lead = tensors["parameter"]
    if all(tensor.is_contiguous() for tensor in tensors.values()):
        return {name: tensor.view(-1) for name, tensor in tensors.items()}
    order = sorted(range(lead.dim()), key=lead.stride, reverse=True)
    permuted = {name: tensor.permute(order) for name, tensor in tensors.items()}
    if all(tensor.is_contiguous() for tensor in permuted.values()):
        return {name: tensor.view(-1) for name, tensor in permuted.items()}
    return tensors
