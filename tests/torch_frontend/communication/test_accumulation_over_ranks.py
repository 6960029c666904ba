"""Micro-batches over processes: held, put into the moments, or left to DDP's and FSDP2's own way of not communicating."""

from __future__ import annotations

import itertools

import pytest
from tests.support.rank_models import (
    ENGINES,
    LR,
    THREE,
    Net,
    assert_bitwise,
    assert_close,
    assert_ranks_equal,
    ddp,
    full_batch,
    loss_of,
    micro_batches,
    parameters_of,
    wrapped,
)
from tests.support.ranks import Ranks
from tests.support.rows import rows

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")

STEPS = range(6)
BOUND = 2e-6
"""Sums of averages instead of averages of sums: a rounding each micro-batch, over few steps."""


def held(engine: str, unsynchronised: bool, sync: bool, rank_dependent: bool = False) -> None:
    def skip(index: int) -> bool:
        import torch.distributed as dist

        return rank_dependent and (index + dist.get_rank()) % 2 == 0

    stock = ddp(Net(dead=True), find_unused_parameters=True)
    optimizer = AdamW(stock.parameters(), **LR)
    micro_batches(stock, optimizer, STEPS, unsynchronised=True, skip=skip)

    model = ENGINES[engine](Net(dead=True))
    optimizer = AdamW(model.parameters(), **LR)
    now = [0]
    release = release_gradients(model, optimizer, accumulation="hold", sync=(lambda: now[0] == 2) if sync else None)
    micro_batches(
        model, optimizer, STEPS, unsynchronised=unsynchronised, skip=skip, on_micro_batch=lambda n: now.__setitem__(0, n)
    )
    found, expected = parameters_of(model), parameters_of(stock)
    assert_ranks_equal(found, engine)
    if unsynchronised or engine == "process_group":
        assert_bitwise(found, expected, engine)
    else:
        assert_close(found, expected, BOUND, engine)
    assert release.ledger.live == 0


HELD = list(itertools.product(ENGINES, [True, False], [True, False]))


@pytest.mark.parametrize(
    ("engine", "unsynchronised", "sync"), rows(HELD, lambda row: row[1] == row[2] if row[0] in THREE else row[2] and not row[1])
)
def test_held_equals_stock_ddp_with_no_sync(ranks: Ranks, engine: str, unsynchronised: bool, sync: bool) -> None:
    if engine == "ddp, static graph" and unsynchronised:
        pytest.skip("torch asserts: a static graph's first pass must be synchronised")
    ranks.run(held, engine, unsynchronised, sync)


@pytest.mark.parametrize("engine", ["process_group", "ddp", "ddp, views of buckets"])
@pytest.mark.parametrize("sync", [True, False])
def test_held_parameters_unused_on_one_rank_equal_stock_ddp(ranks: Ranks, engine: str, sync: bool) -> None:
    ranks.run(held, engine, True, sync, True)


def undeclared(engine: str) -> None:
    """no_sync() and set_requires_gradient_sync(False) are declarations of micro-batches by themselves."""
    stock = ddp(Net())
    optimizer = AdamW(stock.parameters(), **LR)
    micro_batches(stock, optimizer, STEPS, unsynchronised=True)
    model = wrapped(Net(), engine)
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    micro_batches(model, optimizer, STEPS, unsynchronised=True)
    assert_ranks_equal(parameters_of(model), engine)
    assert_bitwise(parameters_of(model), parameters_of(stock), engine)


@pytest.mark.parametrize("engine", ["ddp", "ddp, views of buckets", "fsdp2"])
def test_the_engines_own_accumulation_equals_stock_ddp(ranks: Ranks, engine: str) -> None:
    ranks.run(undeclared, engine)


def into_the_moments(engine: str, rule: type) -> None:
    """Every micro-batch is averaged, then used: as one process does it with the batches of all."""
    single = Net()
    optimizer = rule(single.parameters(), **LR)
    release = release_gradients(single, optimizer, accumulation="state", process_group=alone())
    for step in STEPS:
        for number in range(3):
            (loss_of(single, full_batch(3 * step + number)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    release.remove()
    model = ENGINES[engine](Net())
    optimizer = rule(model.parameters(), **LR)
    release_gradients(model, optimizer, accumulation="state")
    micro_batches(model, optimizer, STEPS)
    assert_ranks_equal(parameters_of(model), engine)
    assert_close(parameters_of(model), parameters_of(single), BOUND, engine)


def alone():
    """A group of this rank only."""
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.parametrize("engine", THREE)
@pytest.mark.parametrize("rule", [AdamW, StableAdamW], ids=lambda rule: rule.__name__)
def test_into_the_moments_equals_one_process_with_all_batches(ranks: Ranks, engine: str, rule: type) -> None:
    ranks.run(into_the_moments, engine, rule)


def into_the_moments_with_unused() -> None:
    import torch.distributed as dist

    trained = []
    for engine in ("process_group", "ddp"):
        model = ENGINES[engine](Net(dead=True))
        optimizer = AdamW(model.parameters(), **LR)
        release_gradients(model, optimizer, accumulation="state")
        micro_batches(model, optimizer, STEPS, skip=lambda index: (index + dist.get_rank()) % 2 == 0)
        trained.append(parameters_of(model))
        assert_ranks_equal(trained[-1], engine)
    assert_bitwise(*trained, "process_group against ddp")


def test_into_the_moments_with_parameters_that_one_rank_does_not_use(ranks: Ranks) -> None:
    ranks.run(into_the_moments_with_unused)


def never_averaged(accumulation: str | None) -> None:
    model = ddp(Net())
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer, accumulation=accumulation)
    from tests.support.rank_models import data

    before = parameters_of(model)
    with model.no_sync():
        loss_of(model, data(0)).backward()
    with pytest.raises(RefusedError, match="never averaged"):
        optimizer.step()
    assert_bitwise(parameters_of(model), before, "a refused step")
    loss_of(model, data(1)).backward()  # outside no_sync it is
    optimizer.step()
    assert_ranks_equal(parameters_of(model), "ddp")


@pytest.mark.parametrize("accumulation", [None, "hold"])
def test_a_step_on_gradients_that_ddp_never_averaged_is_refused(ranks: Ranks, accumulation: str | None) -> None:
    ranks.run(never_averaged, accumulation)


def a_second_backward(engine: str) -> None:
    from tests.support.rank_models import data

    model = ENGINES[engine](Net())
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    loss_of(model, data(0)).backward()
    before = parameters_of(model)
    with pytest.raises(RefusedError, match="a second backward"):
        loss_of(model, data(1)).backward()
    assert_bitwise(parameters_of(model), before, engine)


@pytest.mark.parametrize("engine", THREE)
def test_an_undeclared_second_backward_is_refused(ranks: Ranks, engine: str) -> None:
    ranks.run(a_second_backward, engine)
