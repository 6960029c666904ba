"""The models that are timed: many small tensors, where host time is nearly everything, and 50 medium layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 4


@dataclass(frozen=True)
class Workload:
    """`count` equal blocks in a row.

    width: of what goes in and out of a block. block: makes one. modes: whether every mode of release is timed on it. threads:
    of PyTorch; None: as many as it takes by itself. Small tensors are no work for two, but they would wait for each other.
    """

    name: str
    count: int
    width: int
    block: Callable[[int], nn.Module]
    modes: bool
    threads: int | None = None

    def model(self) -> nn.Sequential:
        """A new model; the same numbers every time."""
        torch.manual_seed(0)
        model = nn.Sequential(*(self.block(self.width) for _ in range(self.count)))
        for module in model.modules():
            if isinstance(module, nn.Linear):  # PyTorch's own start fades over 50 layers to denormals, which are slow
                nn.init.normal_(module.weight, std=self.width**-0.5)
        return model

    def batch(self) -> Tensor:
        """[BATCH, width]."""
        return torch.randn(BATCH, self.width, generator=torch.Generator().manual_seed(1))

    @property
    def tensors(self) -> int:
        """Number of the model's parameters."""
        return len(list(self.model().parameters()))


def small_block(width: int) -> nn.Module:
    """Six tensors."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width))


def linear(width: int) -> nn.Module:
    """A matrix and a bias."""
    return nn.Linear(width, width)


WORKLOADS = {
    "small": Workload("small", 25, 16, small_block, modes=True, threads=1),
    "medium": Workload("medium", 50, 632, linear, modes=False),
}

TINY = Workload("tiny", 2, 16, small_block, modes=True, threads=1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar that every parameter has a gradient of."""
    return model(batch).pow(2).mean()
