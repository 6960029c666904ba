"""Release over processes: every engine gives the numbers of stock DistributedDataParallel, and all ranks the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.rank_models import Net, assert_bitwise, assert_close, assert_ranks_equal, ddp, parameters_of, sharded, train
from tests.support.ranks import Ranks
from torch import nn

from penstock.torch_frontend import Adam, AdamW, StableAdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")

ENGINES: dict[str, Any] = {
    "process_group": lambda model: model,
    "ddp": lambda model: ddp(model, find_unused_parameters=True),
    "ddp, views of buckets": lambda model: ddp(model, find_unused_parameters=True, gradient_as_bucket_view=True),
    "ddp, static graph": lambda model: ddp(model, static_graph=True),
    "fsdp2": sharded,
}


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
@pytest.mark.parametrize("rule", [AdamW, Adam], ids=lambda rule: rule.__name__)
def test_equals_stock_ddp_bit_for_bit_after_50_steps(ranks: Ranks, engine: str, rule: type) -> None:
    ranks.run(equals_stock, engine, rule, torch.float32, 0.0, 50)


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_equals_stock_ddp_bit_for_bit(ranks: Ranks, engine: str) -> None:
    ranks.run(equals_stock, engine, AdamW, torch.bfloat16, 0.0, 10)


@pytest.mark.parametrize("engine", ENGINES)
def test_stable_adamw_equals_stock_ddp_up_to_sums_over_shards(ranks: Ranks, engine: str) -> None:
    """Over shards the mean square is summed in another order."""
    ranks.run(equals_stock, engine, StableAdamW, torch.float32, 1e-6 if engine == "fsdp2" else 0.0, 20)


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
