"""Release over processes: every engine gives the numbers of stock DistributedDataParallel, and all ranks the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.rank_models import (
    ENGINES,
    WIDTH,
    Net,
    assert_bitwise,
    assert_close,
    assert_ranks_equal,
    ddp,
    parameters_of,
    train,
)
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


class Mixed(nn.Module):
    """Parameters of two dtypes, for which DistributedDataParallel has a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.head = nn.Linear(WIDTH, 7).bfloat16(), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        return self.head(self.low(x.bfloat16()).tanh().float())


def equals_plain_in_two_dtypes() -> None:
    found = []
    for released in (True, False):
        model = ddp(Mixed(), static_graph=True)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if released:
            release_gradients(model, optimizer)
        train(model, optimizer, range(3))
        found.append(parameters_of(model))
    assert_bitwise(*found, "two dtypes")


def test_two_dtypes_in_a_static_graph_equal_plain_ddp(ranks: Ranks) -> None:
    """Its first pass reduces all buckets, one a dtype, after all gradients, and says of none that it is the last."""
    ranks.run(equals_plain_in_two_dtypes)


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
