"""A backend that counts launches, and a model of large and small tensors for it."""

from __future__ import annotations

import torch
from tests.support.torch_models import backend_of, use_backend
from torch import Tensor, nn

from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.backend import TensorSlot
from penstock.torch_frontend.backends.eager import EagerBackend

WIDTH, BLOCKS = 64, 4
VECTOR, MATRIX = 4 * WIDTH, 4 * WIDTH * WIDTH
IN_A_LAUNCH = MATRIX // 16 // VECTOR  # vectors that wait at once


class Counting(EagerBackend):
    """Updates many tensors in what counts as one launch."""

    one_launch = True

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[int] = []  # of how many tensors
        self.fails = False

    def update_all(self, pairs, *, over_shards=None, measure=False) -> None:
        if self.fails:
            raise MemoryError("planted")
        self.launches.append(len(pairs))
        for slot, gradient in pairs:
            super().update(slot, gradient, first=True)

    def update(self, slot, gradient, *, first, measure=False):
        self.launches.append(1)
        return super().update(slot, gradient, first=first, measure=measure)


class Checking(Counting):
    """And leaves out what is not finite without the host knowing."""

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        written = [slot.parameter, slot.state["debiased_exp_avg"], slot.state["debiased_exp_avg_sq"]]
        before = [tensor.clone() for tensor in written]
        flag = gradient.isfinite().all()
        self.update(slot, gradient, first=True)
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(torch.where(flag, tensor, old))
        return flag.float()

    def update_each_if_finite(self, pairs) -> list[Tensor]:
        return [self.update_if_finite(slot, gradient) for slot, gradient in pairs]

    def update_all_if_finite(self, pairs) -> Tensor:
        flag = torch.stack([gradient.isfinite().all() for _, gradient in pairs]).all()
        for slot, gradient in pairs:
            self.update_if_finite(slot, torch.where(flag, gradient, torch.nan))
        return flag.float()


def blocks(count: int = BLOCKS) -> nn.Sequential:
    """A matrix and three vectors each."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(count)])


def optimizer_of(model: nn.Module, batched: bool, optimizer_class=StableAdamW, backend=Counting, **options):
    optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1, backend="eager", **options)
    use_backend(optimizer, backend())
    backend_of(optimizer).one_launch = batched
    return optimizer
