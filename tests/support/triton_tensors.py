"""Parameters of several sizes for tests of launches, and their gradients."""

from __future__ import annotations

import torch

NUMELS = (1500, 3, 17, 2100, 1024, 1)


def group(numels=NUMELS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random vectors of these lengths that require gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator).to(dtype).requires_grad_() for numel in numels]


def give_gradients(parameters: list[torch.Tensor], seed: int = 1) -> None:
    """Set random gradients, of standard deviation 3."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * 3
