"""Micro-batched blocks and the token mean over two processes, on every engine."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_models import THREE, WIDTH, Net, assert_close, assert_ranks_equal, data, parameters_of, wrapped
from tests.support.ranks import Ranks
from torch import Tensor, nn

from penstock.torch_frontend import AdamW, microbatch_blocks, release_gradients, token_mean, total_weight

pytestmark = pytest.mark.xdist_group("distributed")

STEPS = range(4)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """In float64 throughout."""
    return (model(batch) - 1).pow(2).mean()


def one_process(max_norm: float) -> Net:
    """Trained with the batches of all ranks: the mean of their losses."""
    model = Net(torch.float64)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in STEPS:
        losses = [mean_loss(model, data(step, rank, torch.float64)) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


def blocks_equal_one_process(engine: str, max_norm: float | None) -> None:
    net = Net(torch.float64)
    model = wrapped(net, engine)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, max_norm=max_norm)
    with microbatch_blocks([net.first, net.middle, net.last], chunks=2):
        for step in STEPS:
            release.guard(mean_loss(model, data(step, dtype=torch.float64))).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = parameters_of(model)
    # 1e-13 in a gradient, amplified by the division through sqrt(v) in each step, at lr 1e-2
    assert_close(found, parameters_of(one_process(math.inf if max_norm is None else max_norm)), 1e-10, engine)
    assert_ranks_equal(found, engine)
    release.remove()


@pytest.mark.parametrize("engine", THREE)
def test_blocks_equal_one_process_with_the_whole_batch(engine: str, ranks: Ranks) -> None:
    ranks.run(blocks_equal_one_process, engine, None)


@pytest.mark.parametrize("engine", ["process_group", "fsdp2"])
def test_clipped_blocks_equal_one_process_that_clips(engine: str, ranks: Ranks) -> None:
    ranks.run(blocks_equal_one_process, engine, 0.05)


COUNTS = ((4, 1, 2), (7, 3, 0))
"""Tokens of each micro-batch, by rank."""


def tokens(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(COUNTS[rank][number], WIDTH, generator=generator, dtype=torch.float64)


def token_mean_equals_one_process(engine: str) -> None:
    expected = Net(torch.float64)
    optimizer = AdamW(expected.parameters(), lr=1e-2)
    everything = torch.cat([tokens(rank, number) for rank in range(2) for number in range(3)])
    mean_loss(expected, everything).backward()
    gradients = [parameter.grad for parameter in expected.parameters()]
    optimizer.step()

    model = wrapped(Net(torch.float64), engine)
    rank = dist.get_rank()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer, accumulation="hold")
    total = total_weight(COUNTS[rank])
    assert total.item() == sum(map(sum, COUNTS))
    for number in range(3):
        loss_sum = (model(tokens(rank, number)) - 1).pow(2).sum()
        token_mean(loss_sum, total).backward()
    optimizer.step()
    assert_close(parameters_of(model), parameters_of(expected), 1e-10, engine)
    assert_ranks_equal(parameters_of(model), engine)
    release.remove()

    plain = Net(torch.float64)  # the gradients themselves, averaged as every engine does
    for number in range(3):
        token_mean((plain(tokens(rank, number)) - 1).pow(2).sum(), total).backward()
    for parameter, wanted in zip(plain.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad / dist.get_world_size(), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", THREE)
def test_the_token_mean_over_ranks_equals_one_process(engine: str, ranks: Ranks) -> None:
    ranks.run(token_mean_equals_one_process, engine)
