"""Tensors seen as vectors in the order of memory, so that a layout costs nothing and changes nothing."""

from __future__ import annotations

from torch import Tensor


def along_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """One-dimensional views in the order of memory, where all tensors are dense and laid out alike; else None.

    Args:
        tensors: of one shape; "parameter" decides the order.
    """
    lead = tensors["parameter"]
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        order = sorted(range(lead.dim()), key=lead.stride, reverse=True)
        permuted = {name: tensor.permute(order) for name, tensor in tensors.items()}
        if not all(tensor.is_contiguous() for tensor in permuted.values()):
            return None
        tensors = permuted
    # Detached last, they are vectors and nothing else: a compiler would also look at what they are views of. They share
    # the parameter's version counter, so that autograd still notices a parameter that changed under a graph.
    return {name: tensor.view(-1).detach() for name, tensor in tensors.items()}
