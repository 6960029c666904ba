"""Small models, the data of each rank, and comparisons over ranks. Everything here runs on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 6


class Net(nn.Module):
    """Layers of uneven shards (7 rows), one with fewer rows than ranks (1), and one that is never used.

    `skip` leaves a layer out; `dead` is a layer that no rank uses.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, *, dead: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(7, 1)
        self.dead = nn.Linear(3, 3) if dead else None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.to(dtype)

    def layers(self) -> list[nn.Module]:
        return [layer for layer in (self.first, self.middle, self.last, self.dead) if layer is not None]

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.first(x).tanh()
        h = h if skip else self.middle(h).tanh()
        return self.last(h)


def data(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's batch of a step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model: nn.Module, batch: Tensor, skip: bool = False) -> Tensor:
    return (model(batch, skip).float() - 1).pow(2).mean()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: Net, **options: Any) -> Net:
    """One FSDP2 group a layer."""
    over = mesh()
    for layer in model.layers():
        fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Buckets of about a layer."""
    return DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)


def whole(tensor: Any) -> Tensor:
    """The whole of a sharded tensor; collective."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    if tensor.dtype is torch.int16:  # which gloo does not send
        return tensor.to(torch.int32).full_tensor().to(torch.int16)
    return tensor.full_tensor().detach().clone()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and state, whole; collective."""
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    kept = [state[key] for state in states for key in sorted(state)]
    return parameters_of(model) + [whole(x) if isinstance(x, Tensor) else torch.tensor(x) for x in kept]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    *,
    before_step: Callable[[], Any] = lambda: None,
    guard: Callable[[Tensor], Tensor] = lambda loss: loss,
    skip: Callable[[int], bool] = lambda step: False,
) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        guard(loss_of(model, data(step, dtype=dtype), skip(step))).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def assert_bitwise(one: Sequence[Tensor], other: Sequence[Tensor], said: str) -> None:
    assert len(one) == len(other), said
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), f"{said}: tensor {index} of shape {tuple(a.shape)} differs by {(a - b).abs().max():.1e}"


def assert_close(one: Sequence[Tensor], other: Sequence[Tensor], bound: float, said: str) -> None:
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item()
        assert error <= bound, f"{said}: tensor {index} of shape {tuple(a.shape)} is off by {error:.1e}, bound {bound:.1e}"


def assert_ranks_equal(tensors: Sequence[Tensor], said: str) -> None:
    for index, tensor in enumerate(tensors):
        there = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(there, tensor)
        assert all(torch.equal(there[0], other) for other in there), f"{said}: tensor {index} differs between ranks"


ENGINES: dict[str, Callable[[Net], nn.Module]] = {
    "process_group": lambda model: model,
    "ddp": lambda model: ddp(model, find_unused_parameters=True),
    "ddp, views of buckets": lambda model: ddp(model, find_unused_parameters=True, gradient_as_bucket_view=True),
    "ddp, static graph": lambda model: ddp(model, static_graph=True),
    "fsdp2": sharded,
}
THREE = ["process_group", "ddp", "fsdp2"]


def wrapped(model: Net, engine: str) -> nn.Module:
    """By an engine, with DistributedDataParallel as it is by default."""
    return ddp(model) if engine == "ddp" else ENGINES[engine](model)


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
