"""Every mode of release in one process, and bare backward passes with the same arithmetic without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.methods import LR, OPTIMIZERS
from penstock.torch_frontend import (
    microbatch_blocks,
    prepare_for_gradient_release,
    release_gradients,
)

from .timing import Row, Timed
from .workloads import Workload, loss_of

GENEROUS = 1e9
"""A max_norm that no gradient reaches."""


@dataclass(frozen=True)
class Mode:
    """One mode of release.

    settings: of release_gradients. optimizer: settings of the optimizer. less: the bare rows to subtract. passes: passes over
    the gradients in a step. micro_batches: backward passes in a step. guarded: the loss is passed through guard().
    sync: release_gradients gets `sync`. chunks: of microbatch_blocks. lenient: set up by prepare_for_gradient_release.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ("bare",)
    passes: int = 1
    micro_batches: int = 1
    guarded: bool = False
    sync: bool = False
    chunks: int | None = None
    lenient: bool = False


GUARD, ADDED, FREED = "bare, 2 passes", "bare, 2 micro-batches added up", "bare, 2 micro-batches freed"
MODES = [
    Mode("lenient", optimizer={"gradient_release": True}, lenient=True),
    Mode("on_nonfinite=skip", optimizer={"on_nonfinite": "skip"}),
    Mode("per-tensor clipping", {"max_norm": GENEROUS, "clipping": "per_tensor"}),
    Mode("guard", {"max_norm": GENEROUS}, less=(GUARD,), passes=2, guarded=True),
    Mode("hold", {"accumulation": "hold"}, less=(ADDED,), passes=2, micro_batches=2),
    Mode("hold, sync", {"accumulation": "hold"}, less=(ADDED,), passes=2, micro_batches=2, sync=True),
    Mode("state", {"accumulation": "state"}, less=(FREED,), passes=2, micro_batches=2),
    Mode("state, sync", {"accumulation": "state"}, less=(FREED,), passes=2, micro_batches=2, sync=True),
    Mode("microbatch_blocks, 1 chunk", less=("bare, checkpointed",), chunks=1),
    Mode("microbatch_blocks, 2 chunks", less=("bare, 2 chunks checkpointed",), passes=2, chunks=2),
]
BASE = Mode("default")


def training_step(model: nn.Module, batch: Tensor, optimizer: Any, mode: Mode) -> Callable[[], None]:
    """Return one step of a training loop under release in this mode."""
    count, last = mode.micro_batches, [True]
    settings = {**mode.settings, **({"sync": lambda: last[0]} if mode.sync else {})}
    guard: Callable[[Tensor], Tensor] | None = None
    if mode.lenient:
        prepare_for_gradient_release(model, optimizer)
    else:
        release = release_gradients(model, optimizer, **settings)
        guard = release.guard if mode.guarded else None

    def step() -> None:
        for number in range(count):
            last[0] = number == count - 1
            loss = loss_of(model, batch) if count == 1 else loss_of(model, batch) / count
            (loss if guard is None else guard(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself."""
    return model


def released(rule: str, mode: Mode, *, wrap: Callable[[nn.Module], nn.Module] = unwrapped, base: str | None = None) -> Row:
    """Return the row of one of penstock's optimizers under release; `wrap` makes the model distributed."""

    def start(workload: Workload) -> Timed:
        model = wrap(workload.model())
        if mode.chunks is not None:
            microbatch_blocks(model.children(), chunks=mode.chunks)
        optimizer = OPTIMIZERS[rule](model.parameters(), lr=LR, **mode.optimizer)
        return Timed(training_step(model, workload.batch(), optimizer, mode))

    return Row(row_name(rule, mode.name), start, mode.less, mode.passes, base)


def row_name(rule: str, mode: str) -> str:
    """Return the name of a row under release."""
    return f"penstock {rule} release, {mode}"


def unreleased(mode: Mode) -> str:
    """Return the name of the row of the same training without release, which exists for microbatch_blocks."""
    return f"{mode.name}, no release"


def mode_rows(rule: str) -> list[Row]:
    """Return the rows of every mode, which are compared with the default path."""
    return [released(rule, mode, base=row_name(rule, BASE.name)) for mode in MODES]


def backward(model: nn.Module, batch: Tensor) -> None:
    """Run forward, backward and zero_grad()."""
    loss_of(model, batch).backward()
    model.zero_grad()


def bare_rows(*, modes: bool) -> list[Row]:
    """Return rows of forward, backward and zero_grad() without an optimizer, with the passes of each mode.

    The last two rows are microbatch_blocks without release, to compare with torch's checkpoint.
    """

    def two_passes(model: nn.Module, batch: Tensor) -> None:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        model.zero_grad()

    def added(model: nn.Module, batch: Tensor) -> None:
        for _ in range(2):
            (loss_of(model, batch) / 2).backward()
        model.zero_grad()

    def freed(model: nn.Module, batch: Tensor) -> None:
        for _ in range(2):
            (loss_of(model, batch) / 2).backward()
            model.zero_grad()

    def checkpointed(chunks: int) -> Callable[[nn.Module, Tensor], None]:
        def step(model: nn.Module, batch: Tensor) -> None:
            for x in batch.chunk(chunks):
                for block in model.children():
                    x = checkpoint(block, x, use_reentrant=False)
                (x.pow(2).mean() / chunks).backward()
            model.zero_grad()

        return step

    def divided(chunks: int) -> Row:
        def start(workload: Workload) -> Timed:
            model, batch = workload.model(), workload.batch()
            microbatch_blocks(model.children(), chunks=chunks)
            return Timed(lambda: backward(model, batch))

        mode = next(mode for mode in MODES if mode.chunks == chunks)
        return Row(unreleased(mode), start, mode.less, mode.passes)

    rows = [bare("bare")]
    if modes:
        rows += [bare(GUARD, two_passes), bare(ADDED, added), bare(FREED, freed)]
        rows += [bare("bare, checkpointed", checkpointed(1)), bare("bare, 2 chunks checkpointed", checkpointed(2))]
        rows += [divided(1), divided(2)]
    return rows


def bare(
    name: str,
    step: Callable[[nn.Module, Tensor], None] = backward,
    wrap: Callable[[nn.Module], nn.Module] = unwrapped,
) -> Row:
    """Return the row of a model and a batch without an optimizer."""

    def start(workload: Workload) -> Timed:
        model, batch = wrap(workload.model()), workload.batch()
        return Timed(lambda: step(model, batch))

    return Row(name, start)


def plain(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> Row:
    """Return the row of a plain optimizer, of which only step() and zero_grad() are timed."""

    def start(workload: Workload) -> Timed:
        model, batch = workload.model(), workload.batch()
        optimizer = make(model.parameters())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return Timed(step, before=lambda: loss_of(model, batch).backward())

    return Row(name, start)
