"""One-dimensional views of tensors in memory order, for every dense memory format."""

from __future__ import annotations

from torch import Tensor


def along_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return 1-d views in memory order, or None unless all tensors are dense with the same order of dimensions.

    Args:
        tensors: by name, all of one shape; "parameter" determines the order of dimensions.
    """
    lead = tensors["parameter"]
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        order = sorted(range(lead.dim()), key=lead.stride, reverse=True)
        permuted = {name: tensor.permute(order) for name, tensor in tensors.items()}
        if not all(tensor.is_contiguous() for tensor in permuted.values()):
            return None
        tensors = permuted
    # Detached last, so that torch.compile sees plain vectors and not their bases. They share the parameter's version
    # counter, so that autograd still notices a parameter that was changed after it was saved for backward.
    return {name: tensor.view(-1).detach() for name, tensor in tensors.items()}
