"""Norms and clip coefficients as in `torch.nn.utils.clip_grad_norm_`, without a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .communication.shards import Shard, local, norms_over_shards

NORM_EPS = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


def gradient_norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a gradient, or of the local part of a sharded one, 0-d.

    It is float64, in which finite float32 elements cannot overflow (float32 on devices without float64).
    """
    gradient = local(gradient)
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.device.type == "mps" else torch.float64)


def square_sum(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's squares, or of the local part of a sharded one, in the dtype of `gradient_norm`, 0-d."""
    return gradient_norm(gradient).square()


def square_sums(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the sums of squares of several gradients, 0-d in the compute dtype, as updates measure them."""
    if not gradients:
        return ()
    dtype = torch.float64 if any(gradient.dtype is torch.float64 for gradient in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch._foreach_mul(norms, norms)  # pyright: ignore[reportPrivateImportUsage]


def is_finite(gradient: Tensor, norm: Tensor) -> Tensor:
    """Return whether all elements of a gradient, or of the local part of a sharded one, are finite; 0-d.

    Args:
        norm: its `gradient_norm`. If its dtype has more bits than the gradient's, finite elements cannot overflow it, and it
            tells as much as a look at every element, which takes several times as long.
    """
    if norm.dtype.itemsize > gradient.dtype.itemsize:
        return torch.isfinite(norm)
    return torch.isfinite(local(gradient)).all()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor | float:
    """Return min(1, max_norm / (norm + 1e-6)): a number for a norm on the CPU, otherwise a 0-d tensor on its device.

    Args:
        norm: 0-d.
        max_norm: in (0, inf].
    """
    if type(norm) is not Tensor or norm.device.type != "cpu":  # a fake tensor has no number
        return torch.div(max_norm, norm + NORM_EPS).clamp_(max=1.0)
    coefficient = max_norm / (norm.item() + NORM_EPS)
    return 1.0 if coefficient > 1.0 else coefficient  # min() would drop a NaN


def multiply_(gradient: Tensor, factor: Tensor | float) -> None:
    """Multiply a gradient in place, in its dtype."""
    if isinstance(factor, Tensor):
        local(gradient).mul_(factor.to(gradient.device))
    elif factor != 1.0:
        local(gradient).mul_(factor)


def clip_by_norm_(gradients: Sequence[Tensor], shards: Sequence[Shard | None], max_norm: float) -> list[Tensor]:
    """Scale each gradient in place so that its own norm is at most `max_norm`.

    Args:
        gradients: local parts.
        shards: of their parameters.
        max_norm: in (0, inf].

    Returns:
        The norms of the local parts before clipping, 0-d.
    """
    here = [gradient_norm(gradient) for gradient in gradients]
    for gradient, norm in zip(gradients, norms_over_shards(shards, here), strict=True):
        multiply_(gradient, clip_coefficient(norm, max_norm))
    return here
