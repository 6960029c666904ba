"""A loop of Accelerate trains as it does with the plain optimizer, and its gradients are gone earlier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tests.support.rows import covering
from tests.support.tiny_llama import (
    assert_same_losses,
    assert_same_norms,
    fp16_on_cpu,
    gradient_bytes,
    largest_gradient,
    sequences,
    tiny_llama,
)
from tests.support.torch_models import gone
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW
from penstock.torch_frontend.integrations.accelerate import release_gradients
from penstock.torch_frontend.release import Release


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate's settings are those of the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Parts(NamedTuple):
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    release: Release | None


def prepared(
    *,
    released: bool,
    precision: str = "no",
    steps: int = 1,
    scale: float = 2.0**10,
    samples: int = 20,
    wrapped: bool = True,
    **options: Any,
) -> Parts:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    if precision == "fp16":
        fp16_on_cpu(accelerator, scale)
    model = tiny_llama()
    # A large eps makes AdamW follow the size of the gradient, so that clipping matters; see test_transformers for the lr.
    optimizer = AdamW(model.parameters(), lr=0.3 if precision == "no" else 0.01, eps=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=20)
    loader = torch.utils.data.DataLoader(sequences(samples), batch_size=4)
    model = accelerator.prepare_model(model, evaluation_mode=not wrapped)  # True: without DistributedDataParallel
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    release = release_gradients(accelerator, model, optimizer, **options) if released else None
    return Parts(accelerator, model, optimizer, scheduler, loader, release)


class Trace(NamedTuple):
    losses: list[float]
    norms: list[float]
    rates: list[float]


def train(parts: Parts, *, epochs: int = 2, clip: float | None = None) -> Trace:
    """The loop of Accelerate's documentation, with guard() where there is a release."""
    accelerator, model, optimizer, scheduler, loader, release = parts
    trace = Trace([], [], [])
    for batch in _epochs(loader, epochs):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss if release is None else release.guard(loss))
            if clip is not None and accelerator.sync_gradients:
                trace.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        trace.losses.append(loss.item())
        trace.rates.append(scheduler.get_last_lr()[0])
    return trace


def _epochs(loader: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        yield from loader


def compare(clip: float | None = None, declared: float | None = None, **settings: Any) -> tuple[Parts, Parts]:
    plain, released = prepared(released=False, **settings), prepared(released=True, max_norm=declared or clip, **settings)
    one, other = train(released, clip=clip), train(plain, clip=clip)
    assert_same_losses(one.losses, other.losses)
    assert_same_norms(one.norms, other.norms)
    assert one.rates == other.rates  # a skipped step does not count
    return plain, released


@pytest.mark.parametrize(
    ("precision", "steps", "clip"),
    covering(["no", "bf16"], [1, 3], [None, 1.0]),  # of 5 batches an epoch: the last group has two
)
def test_losses_and_norms_are_those_of_the_plain_optimizer(precision: str, steps: int, clip: float | None) -> None:
    compare(clip, precision=precision, steps=steps)


@pytest.mark.parametrize(("clip", "steps", "scale"), covering([None, 1.0], [1, 3], [2.0**24, 2.0**10]))
def test_fp16_equals_the_plain_scaler_overflows_included(clip: float | None, steps: int, scale: float) -> None:
    """Accelerate makes no GradScaler on a CPU; given one, its own code does the rest."""
    plain, released = compare(clip, precision="fp16", steps=steps, scale=scale)
    assert released.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()
    assert (released.accelerator.scaler.get_scale() < scale) == (scale > 2.0**20)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_release_clips_where_the_loop_does_not(steps: int) -> None:
    plain, released = prepared(released=False, steps=steps), prepared(released=True, steps=steps, max_norm=1.0)
    one, other = train(released), train(plain, clip=1.0)
    assert_same_losses(one.losses, other.losses)
    assert released.release.last_norm.item() == pytest.approx(other.norms[-1], rel=1e-4)
    free = train(prepared(released=False, steps=steps))
    assert abs(free.losses[-1] / other.losses[-1] - 1) > 1e-2  # clipping matters here


@pytest.mark.parametrize(("clip", "left"), [(None, 0), (1.0, 21)])  # all, which step() clips
def test_the_last_backward_releases(clip: float | None, left: int) -> None:
    accelerator, model, optimizer, _, loader, release = prepared(released=True, steps=5, max_norm=clip)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(release.guard(model(**batch).loss))
            alive = sum(not gone([parameter]) for parameter in model.parameters())
            assert alive == (left if accelerator.sync_gradients else 21)
            optimizer.step()
            optimizer.zero_grad()


def test_one_gradient_is_alive() -> None:
    parts = prepared(released=True, max_norm=1.0)
    with LiveGradientMeter(parts.model.named_parameters()) as meter:
        train(parts, clip=1.0)
    assert meter.peak <= 2 * largest_gradient(parts.model) < gradient_bytes(parts.model) / 4


def test_micro_batches_in_the_moments_keep_one_gradient_alive() -> None:
    parts = prepared(released=True, steps=3, accumulation="state")
    with LiveGradientMeter(parts.model.named_parameters()) as meter:
        trace = train(parts)
    assert meter.peak <= 2 * largest_gradient(parts.model)
    assert trace.losses[5:] < trace.losses[:5]


@pytest.mark.parametrize(("precision", "steps"), covering(["no", "fp16"], [1, 3]))
def test_resuming_equals_going_on(precision: str, steps: int, tmp_path: Path) -> None:
    """Saved between two epochs; evaluated there as well."""
    whole = prepared(released=True, precision=precision, steps=steps, max_norm=1.0)
    train(whole, epochs=1, clip=1.0)
    whole.accelerator.save_state(str(tmp_path))
    whole.model.eval()
    with torch.no_grad():
        whole.release.guard(whole.model(**next(iter(whole.loader))).loss)
    whole.model.train()
    expected = train(whole, epochs=1, clip=1.0)
    resumed = prepared(released=True, precision=precision, steps=steps, max_norm=1.0)
    resumed.accelerator.load_state(str(tmp_path))
    assert train(resumed, epochs=1, clip=1.0) == expected
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_undeclared_clipping_raises() -> None:
    with pytest.raises(RefusedError, match="max_norm"):
        train(prepared(released=True), clip=1.0)
    with pytest.raises(RefusedError, match="max_norm"):
        train(prepared(released=True, max_norm=1.0), clip=0.5)


def test_settings_that_cannot_be_met_are_refused() -> None:
    parts = prepared(released=False, steps=2)
    with pytest.raises(InvalidArgumentError, match="prepare"):
        release_gradients(parts.accelerator, parts.model, parts.optimizer.optimizer)
    unfit: Any = parts.optimizer
    with pytest.raises(InvalidArgumentError, match=r"than \(accelerator, model, optimizer\): .* model is AcceleratedOptimizer"):
        release_gradients(parts.accelerator, unfit, parts.model)
    with pytest.raises(InvalidArgumentError, match="accumulation='sum'"):
        release_gradients(parts.accelerator, parts.model, parts.optimizer, accumulation="sum")
    half = prepared(released=False, precision="fp16", steps=2)
    half.model.half()
    with pytest.raises(RefusedError, match="float16"):
        release_gradients(half.accelerator, half.model, half.optimizer)
    with pytest.raises(RefusedError, match="max_norm"):
        release_gradients(parts.accelerator, parts.model, parts.optimizer, max_norm=1.0, accumulation="state")
