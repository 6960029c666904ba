"""Clipping and loss scaling over processes: norms are of averaged gradients, and all ranks decide the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_models import (
    ENGINES,
    LR,
    THREE,
    Net,
    assert_bitwise,
    assert_close,
    assert_ranks_equal,
    data,
    ddp,
    loss_of,
    parameters_of,
    train,
    wrapped,
)
from tests.support.ranks import Ranks
from torch import nn

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")

MAX_NORM = 0.3
CLIP_BOUND = 1e-5


def stock_clipped(steps: int, rule: type, skip: Callable[[int], bool]) -> tuple[nn.Module, list]:
    model = ddp(Net(dead=True), find_unused_parameters=True)
    optimizer = rule(model.parameters(), **LR)
    norms = []

    def clip() -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())

    train(model, optimizer, range(steps), before_step=clip, skip=skip)
    return model, norms


def guarded(engine: str, rule: type, rank_dependent: bool) -> None:
    def skip(step: int) -> bool:
        return rank_dependent and (step + dist.get_rank()) % 2 == 0

    stock, norms = stock_clipped(20, rule, skip)
    model = ENGINES[engine](Net(dead=True))
    optimizer = rule(model.parameters(), **LR)
    release = release_gradients(model, optimizer, max_norm=MAX_NORM)
    seen = []
    train(
        model, optimizer, range(20), guard=release.guard, skip=skip, before_step=lambda: seen.append(release.last_norm.item())
    )
    found = parameters_of(model)
    assert_ranks_equal(found, engine)
    assert_close(found, parameters_of(stock), CLIP_BOUND, engine)
    assert max(norms) > MAX_NORM
    torch.testing.assert_close(seen, norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("engine", ["process_group", "fsdp2"])
@pytest.mark.parametrize("rule", [AdamW, StableAdamW], ids=lambda rule: rule.__name__)
def test_two_passes_equal_stock_ddp_with_clipping(ranks: Ranks, engine: str, rule: type) -> None:
    ranks.run(guarded, engine, rule, False)


def test_two_passes_with_parameters_that_one_rank_does_not_use(ranks: Ranks) -> None:
    ranks.run(guarded, "process_group", AdamW, True)


def two_passes_on_ddp() -> None:
    model = ddp(Net())
    optimizer = AdamW(model.parameters(), **LR)
    for options in ({"max_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(RefusedError, match=r"DistributedDataParallel is not averaged.*plain module"):
            release_gradients(model, optimizer, **options)
    assert optimizer.release is None


def test_two_passes_through_ddp_are_refused_at_set_up(ranks: Ranks) -> None:
    ranks.run(two_passes_on_ddp)


OVERFLOWS = (2, 5)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler, guard, clip, count: int) -> list[float]:
    """Steps whose loss overflows on one rank only."""
    scales = []
    for step in range(8):
        for number in range(count):
            batch = data(step * count + number)
            if step in OVERFLOWS and dist.get_rank() == 1 and number == 0:
                batch = batch * 1e30
            scaler.scale(guard((model(batch) * batch.mean()).pow(2).mean() / count)).backward()
        scaler.unscale_(optimizer)
        clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def grad_scaler(engine: str, accumulation: str | None, max_norm: float | None) -> None:
    count = 1 if accumulation is None else 2
    new_scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)  # noqa: E731
    stock = ddp(Net())
    optimizer = AdamW(stock.parameters(), **LR)
    clip = (lambda: None) if max_norm is None else (lambda: torch.nn.utils.clip_grad_norm_(stock.parameters(), max_norm))
    expected_scales = scaled(stock, optimizer, new_scaler(), lambda loss: loss, clip, count)
    model = wrapped(Net(), engine)
    optimizer = AdamW(model.parameters(), **LR)
    scaler = new_scaler()
    now = [0]
    sync = None if accumulation is None else (lambda: now[0] % count == 0)

    def guard(loss):
        now[0] += 1
        return release.guard(loss)

    release = release_gradients(model, optimizer, scaler=scaler, accumulation=accumulation, max_norm=max_norm, sync=sync)
    assert scaled(model, optimizer, scaler, guard, lambda: None, count) == expected_scales
    assert min(expected_scales) < 2.0**16, "nothing overflowed"
    found = parameters_of(model)
    assert_ranks_equal(found, engine)
    if max_norm is None and (accumulation is None or engine == "ddp"):
        assert_bitwise(found, parameters_of(stock), engine)
    else:  # the norm is summed in float64; held gradients are averaged once
        assert_close(found, parameters_of(stock), CLIP_BOUND, engine)


@pytest.mark.parametrize(
    ("engine", "accumulation"),
    [("process_group", None), ("fsdp2", None), ("process_group", "hold"), ("ddp", "hold"), ("fsdp2", "hold")],
)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_grad_scaler_with_an_overflow_on_one_rank(ranks: Ranks, engine: str, accumulation, max_norm) -> None:
    ranks.run(grad_scaler, engine, accumulation, max_norm)


def skips_alike(engine: str) -> None:
    """on_nonfinite="skip" is judged on the average, and of a sharded gradient on all shards."""
    model = wrapped(Net(), engine)
    optimizer = AdamW(model.parameters(), **LR, on_nonfinite="skip")
    release = release_gradients(model, optimizer)
    before = parameters_of(model)
    loss = loss_of(model, data(0))
    (loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_bitwise(parameters_of(model), before, engine)
    assert release.skipped == len(before)
    train(model, optimizer, range(1, 3))
    assert_ranks_equal(parameters_of(model), engine)


@pytest.mark.parametrize("engine", THREE)
def test_gradients_that_are_not_finite_on_one_rank_are_skipped_on_all(ranks: Ranks, engine: str) -> None:
    ranks.run(skips_alike, engine)
