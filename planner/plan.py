"""Runs a training step on fake tensors, which have real shapes and lifetimes and no memory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_frontend
from ..core.errors import MissingDependencyError
from ..core.rules import ADAMW, MUON
from ..torch_frontend import microbatch_blocks, param_groups_for_muon, release_gradients
from ..torch_frontend.backends import OverShards, TensorSlot
from ..torch_frontend.backends.eager import EagerBackend
from ..torch_frontend.releasable import ReleasableOptimizer
from .live_storages import LiveStorageMeter
from .llama import Llama
from .settings import LlamaShape, Mode, Training


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory of one mode.

    peak: bytes alive at most in a step. by_kind: at that moment: parameters, optimizer state, gradients, activations and
    temporaries. ledger: bytes of gradient alive at most by the release's own account; None without release.
    seconds: that planning took.
    """

    mode: str
    result: str
    peak: int
    by_kind: dict[str, int]
    ledger: int | None
    seconds: float


class InPlaceKernels:
    """A backend that does nothing: it replaces kernels that update in place and allocate nothing.

    Rules that need whole matrices have no such kernels: their steps are the eager ones, with their temporaries.
    """

    name = "kernels"
    one_launch = False  # nothing waits: a gradient is gone when its kernel is launched

    def __init__(self) -> None:
        self._of_matrices = EagerBackend(scratch_on_cpus=False)

    def update_all(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None, measure: bool = False
    ) -> None:
        for slot, gradient in pairs:
            self.update(slot, gradient, first=True)

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> None:
        if slot.rule.of_matrix is not None:
            self._of_matrices.update(slot, gradient, first=first)

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        pass

    def apply(self, slot: TensorSlot) -> None:
        if slot.rule.of_matrix is not None:
            self._of_matrices.apply(slot)


def plan(shape: LlamaShape, training: Training, mode: Mode, *, fake: bool = True) -> Plan:
    """Run one step, and return the peak of live memory.

    The model, autograd, the optimizer and release are the real ones, except that the update itself is taken to allocate
    nothing, as a fused kernel's does (but Muon's). What other kernels allocate inside one operation is not seen, nor an
    allocator's rounding and fragmentation.

    Args:
        shape: of the model.
        training: how.
        mode: in which of the ways.
        fake: False: with real tensors, on the CPU.

    Raises:
        MissingDependencyError: this PyTorch has no fake tensors.
    """
    started = time.perf_counter()
    with _fake_tensors() if fake else contextlib.nullcontext():
        model = Llama(
            shape, dtype=getattr(torch, training.dtype), checkpointing=training.checkpointing and mode.name != "blocks"
        )
        optimizer = _torch_adamw(model) if mode.name == "torch" else _optimizer(model, training)
        release = _release(model, optimizer, mode)
        if isinstance(optimizer, ReleasableOptimizer):
            optimizer._backend = InPlaceKernels()
        count = training.micro_batches if mode.divided else 1
        sizes = training.batch // count, training.sequence + 1
        tokens = [torch.zeros(sizes, dtype=torch.int64) for _ in range(count)]
        named: dict[str, list[Tensor]] = {
            "parameters": list(model.parameters()),
            "optimizer state": [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)],
            "activations and temporaries": tokens,
        }
        chunks = training.micro_batches if mode.name == "blocks" else None
        divided = contextlib.nullcontext() if chunks is None else microbatch_blocks([*model.layers, model.head], chunks=chunks)
        with divided, LiveStorageMeter(named, parameters=model.parameters()) as meter:
            for batch in tokens:
                loss = model(batch) / count
                (loss if release is None else release.guard(loss)).backward()
                del loss
            if release is None:  # under release step() only closes the step; it would look at numbers
                if mode.name != "torch":  # whose fused update is in place, too
                    optimizer.step()
                optimizer.zero_grad()
        ledger = None if release is None else release.ledger.peak
    return Plan(mode.name, mode.result, meter.peak, dict(meter.at_peak), ledger, time.perf_counter() - started)


def _optimizer(model: Llama, training: Training) -> ReleasableOptimizer:
    """Return the optimizer of this package, with its state."""
    first, *others = training.rules
    groups: Any = model.parameters()
    if others:
        rules = {MUON.name: first.name, ADAMW.name: others[0].name}
        groups = [{**group, "rule": rules[group["rule"]]} for group in param_groups_for_muon(model)]
    optimizer: ReleasableOptimizer = getattr(torch_frontend, training.optimizer.partition("+")[0])(
        groups,
        compensation=training.compensation,
        state_dtype=getattr(torch, training.state_dtype or "", training.state_dtype),  # "8bit" is not a dtype
        backend="eager",
        capturable=True,  # the number of updates is a tensor that nobody reads
    )
    for parameter in model.parameters():
        optimizer._slot(parameter)  # its state, which would otherwise come to be with its first update
    return optimizer


def _torch_adamw(model: Llama) -> torch.optim.AdamW:
    """Return torch's AdamW, with the state that its first step makes."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


def _release(model: Llama, optimizer: Any, mode: Mode) -> Any:
    if mode.name in ("torch", "plain"):
        return None
    return release_gradients(
        model,
        optimizer,
        max_norm=1.0 if mode.name == "guard" else None,
        accumulation=mode.name if mode.name in ("hold", "state") else None,
    )


@contextlib.contextmanager
def _fake_tensors() -> Iterator[None]:
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode  # not public, and there is no other way
    except ImportError as error:
        raise MissingDependencyError(
            "planning needs torch._subclasses.fake_tensor, which this PyTorch does not have."
        ) from error
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
