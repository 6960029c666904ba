"""Release over processes: every engine gives the numbers of stock DistributedDataParallel, and all ranks the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.rank_models import ENGINES, Net, assert_bitwise, assert_close, assert_ranks_equal, ddp, parameters_of, train
from tests.support.ranks import Ranks
from torch import nn

from penstock.torch_frontend import Adam, AdamW, StableAdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")


def stock(steps: int, rule: type = AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Trained by DistributedDataParallel, without release."""
    model = ddp(Net(dtype, dead=True), find_unused_parameters=True)
    optimizer = rule(model.parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, range(steps), **options)
    return model


def equals_stock(engine: str, rule: type, dtype: torch.dtype, bound: float, steps: int) -> None:
    """Also with a layer that nobody uses."""
    model = ENGINES[engine](Net(dtype, dead=True))
    optimizer = rule(model.parameters(), lr=1e-2, weight_decay=0.1)
    release = release_gradients(model, optimizer)
    train(model, optimizer, range(steps))
    expected, found = parameters_of(stock(steps, rule, dtype)), parameters_of(model)
    assert_ranks_equal(found, engine)
    if bound == 0:
        assert_bitwise(found, expected, engine)
    else:
        assert_close(found, expected, bound, engine)
    assert all(p.grad is None for p in model.parameters())
    dead = [p for name, p in model.named_parameters() if "dead" in name]
    assert dead
    assert not any(optimizer.state[p] for p in dead if p in optimizer.state), "an unused parameter was updated"
    assert release.ledger.live == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rule", "dtype", "steps"),
    [(AdamW, torch.float32, 50), (Adam, torch.float32, 20), (AdamW, torch.bfloat16, 10), (StableAdamW, torch.float32, 20)],
)
def test_release_equals_stock_ddp_bit_for_bit(ranks: Ranks, engine: str, rule: type, dtype: torch.dtype, steps: int) -> None:
    """But StableAdamW's mean square over shards, which is summed in another order."""
    ranks.run(equals_stock, engine, rule, dtype, 1e-6 if (rule, engine) == (StableAdamW, "fsdp2") else 0.0, steps)


def rank_dependent_graphs(engine: str) -> None:
    def skip(step: int) -> bool:
        return (step + torch.distributed.get_rank()) % 3 == 0

    model = ENGINES[engine](Net(dead=True))
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    release_gradients(model, optimizer)
    train(model, optimizer, range(9), skip=skip)
    found = parameters_of(model)
    assert_ranks_equal(found, engine)
    assert_bitwise(found, parameters_of(stock(9, skip=skip)), engine)


@pytest.mark.parametrize("engine", ["process_group", "ddp", "ddp, views of buckets"])
def test_parameters_unused_on_one_rank_equal_stock_ddp(ranks: Ranks, engine: str) -> None:
    ranks.run(rank_dependent_graphs, engine)
