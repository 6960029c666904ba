"""Norms and clip coefficients, as `torch.nn.utils.clip_grad_norm_` defines them, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .communication.shards import Shard, local, norms_over_shards

NORM_EPS = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


def gradient_norm(gradient: Tensor) -> Tensor:
    """The 2-norm of one gradient, of a sharded one of the part that lies here, 0-d.

    In float64, where finite elements cannot overflow (float32 on devices without it).
    """
    gradient = local(gradient)
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.device.type == "mps" else torch.float64)


def square_sum(gradient: Tensor) -> Tensor:
    """The sum of a gradient's squares, 0-d; of a sharded one of the part that is stored here. Precise as `gradient_norm`."""
    return gradient_norm(gradient).square()


def square_sums(gradients: list[Tensor]) -> Sequence[Tensor]:
    """`square_sum` of several, in the compute dtype, as updates find them beside their work."""
    if not gradients:
        return ()
    wide = torch.float64 if any(gradient.dtype is torch.float64 for gradient in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    return torch._foreach_mul(norms, norms)  # pyright: ignore[reportPrivateImportUsage]


def is_finite(gradient: Tensor, norm: Tensor) -> Tensor:
    """Whether no element of the gradient, of a sharded one of the part that lies here, is an infinity or a NaN; 0-d.

    `norm` is its `gradient_norm`. In a wider dtype than the gradient's, finite elements cannot overflow it, and it says as
    much as a look at the elements, which takes several times as long.
    """
    if norm.dtype.itemsize > gradient.dtype.itemsize:
        return torch.isfinite(norm)
    return torch.isfinite(local(gradient)).all()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor | float:
    """min(1, max_norm / (norm + 1e-6)): a number if the norm is a number on the CPU, otherwise 0-d: nothing waits for a device.

    norm: 0-d.
    """
    if type(norm) is not Tensor or norm.device.type != "cpu":  # a fake tensor has no number
        return torch.div(max_norm, norm + NORM_EPS).clamp_(max=1.0)
    coefficient = max_norm / (norm.item() + NORM_EPS)
    return 1.0 if coefficient > 1.0 else coefficient  # min() would drop a NaN


def multiply_(gradient: Tensor, factor: Tensor | float) -> None:
    """In place, in the gradient's dtype; a sharded one where it lies."""
    if isinstance(factor, Tensor):
        local(gradient).mul_(factor.to(gradient.device))
    elif factor != 1.0:
        local(gradient).mul_(factor)


def clip_by_norm_(gradients: Sequence[Tensor], shards: Sequence[Shard | None], max_norm: float) -> list[Tensor]:
    """Scale each gradient in place so that its own norm is at most `max_norm`; return the norms of the local parts, 0-d.

    shards: of their parameters.
    """
    here = [gradient_norm(gradient) for gradient in gradients]
    for gradient, norm in zip(gradients, norms_over_shards(shards, here), strict=True):
        multiply_(gradient, clip_coefficient(norm, max_norm))
    return here
