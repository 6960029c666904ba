"""The models that are timed: many small tensors, which take almost only host time, and 50 medium layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 4


@dataclass(frozen=True)
class Workload:
    """A model of `count` equal blocks in sequence.

    width: number of a block's inputs and outputs. block: makes one. modes: whether every mode of release is timed on it.
    threads: of PyTorch; None: PyTorch's default. With several threads, small tensors would take longer.
    """

    name: str
    count: int
    width: int
    block: Callable[[int], nn.Module]
    modes: bool
    threads: int | None = None

    def model(self) -> nn.Sequential:
        """Return a new model with the same parameters at each call."""
        torch.manual_seed(0)
        model = nn.Sequential(*(self.block(self.width) for _ in range(self.count)))
        for module in model.modules():
            if isinstance(module, nn.Linear):  # PyTorch's own initialisation decays over 50 layers to slow denormals
                nn.init.normal_(module.weight, std=self.width**-0.5)
        return model

    def batch(self) -> Tensor:
        """Return a seeded batch, [BATCH, width]."""
        return torch.randn(BATCH, self.width, generator=torch.Generator().manual_seed(1))

    @property
    def tensors(self) -> int:
        """Number of the model's parameters."""
        return len(list(self.model().parameters()))


def small_block(width: int) -> nn.Module:
    """Return a block of six tensors."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width))


def linear(width: int) -> nn.Module:
    """Return a block of a matrix and a bias."""
    return nn.Linear(width, width)


WORKLOADS = {
    "small": Workload("small", 25, 16, small_block, modes=True, threads=1),
    "medium": Workload("medium", 50, 632, linear, modes=False),
}

TINY = Workload("tiny", 2, 16, small_block, modes=True, threads=1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a scalar on which every parameter has a gradient."""
    return model(batch).pow(2).mean()
