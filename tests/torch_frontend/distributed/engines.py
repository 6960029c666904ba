"""The engines of communication, and what they are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.torch_frontend.distributed.models import Net, data, ddp, loss_of, sharded
from torch import Tensor, nn

ENGINES: dict[str, Callable[[Net], nn.Module]] = {
    "process_group": lambda model: model,
    "ddp": lambda model: ddp(model, find_unused_parameters=True),
    "ddp, views of buckets": lambda model: ddp(model, find_unused_parameters=True, gradient_as_bucket_view=True),
    "ddp, static graph": lambda model: ddp(model, static_graph=True),
    "fsdp2": sharded,
}
THREE = ["process_group", "ddp", "fsdp2"]
LR = {"lr": 1e-2, "weight_decay": 0.1}


def micro_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    *,
    count: int = 3,
    unsynchronised: bool = False,
    skip: Callable[[int], bool] = lambda step: False,
    guard: Callable[[Tensor], Tensor] = lambda loss: loss,
    before_step: Callable[[], Any] = lambda: None,
    step: Callable[[], Any] | None = None,
    on_micro_batch: Callable[[int], Any] = lambda number: None,
) -> None:
    """Gradient accumulation; `unsynchronised`: as each engine lets users leave communication to the last micro-batch."""
    dtype = next(model.parameters()).dtype
    for update in steps:
        for number in range(count):
            on_micro_batch(number)
            last = number == count - 1
            quiet: Any = contextlib.nullcontext()
            if unsynchronised and hasattr(model, "no_sync") and not last:
                quiet = model.no_sync()  # type: ignore[operator]
            if unsynchronised and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with quiet:
                index = count * update + number
                guard(loss_of(model, data(index, dtype=dtype), skip(index)) / count).backward()
        before_step()
        (step or optimizer.step)()
        optimizer.zero_grad()


def full_batch(index: int) -> Tensor:
    """The batches of all ranks: its mean loss has the average of the ranks' gradients."""
    return torch.cat([data(index, rank) for rank in range(dist.get_world_size())])
