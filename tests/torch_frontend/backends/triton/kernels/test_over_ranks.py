"""The kernels over processes: shards of DTensors, and small averaged gradients that share a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rank_models import (
    Net,
    assert_bitwise,
    assert_ranks_equal,
    data,
    ddp,
    mesh,
    parameters_of,
    sharded,
    train,
    whole,
)
from tests.support.ranks import Ranks
from tests.support.rows import rows
from tests.support.torch_models import all_parameters
from tests.support.triton_launches import watched
from tests.torch_frontend.communication import test_sharded_optimizers as shards
from torch import nn
from torch.distributed.fsdp import fully_shard

from penstock.core.release import Action
from penstock.torch_frontend import Adam, AdamW, StableAdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")

quietly = np.errstate(all="ignore")  # numpy, which interprets the kernels, warns where a device does not
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "backend": "triton"}


@quietly
def equals_ddp(rule: type, dtype: torch.dtype, bound: float) -> None:
    shards.equals_ddp(rule, dtype, "triton", bound, steps=2)


@pytest.mark.parametrize(
    ("rule", "dtype", "bound"),
    rows(
        [(StableAdamW, torch.float32, 1e-6), (AdamW, torch.float32, 1e-6), (Adam, torch.bfloat16, 2 * 2.0**-9)],
        lambda row: row[0] is not AdamW,
    ),
)
def test_a_step_on_shards_equals_whole_tensors(ranks: Ranks, rule: type, dtype: torch.dtype, bound: float) -> None:
    """Against the eager backend, whose square root may round otherwise; in bfloat16 that is a rounding a step."""
    ranks.run(equals_ddp, rule, dtype, bound)


@quietly
def released_equals_plain(rule: type, dtype: torch.dtype, capturable: bool) -> None:
    found = []
    for released in (False, True):
        model = sharded(Net(dtype))
        optimizer = rule(model.parameters(), capturable=capturable, **OPTIONS)
        if released:
            release_gradients(model, optimizer)
        train(model, optimizer, range(2))
        assert_ranks_equal(parameters_of(model), "FSDP2 with release")
        found.append(parameters_of(model) + [whole(x) for p in model.parameters() for x in optimizer.state[p].values()])
    assert_bitwise(*found, "FSDP2 with release")


@pytest.mark.parametrize("rule", [StableAdamW, AdamW], ids=lambda rule: rule.__name__)
def test_released_shards_equal_a_step_bit_for_bit(ranks: Ranks, rule: type) -> None:
    ranks.run(released_equals_plain, rule, torch.bfloat16, rule is StableAdamW)


@quietly
def launches_and_collectives(released: bool) -> tuple[int, int]:
    """Of one backward and step, without what FSDP2 and the published norm exchange."""
    launched: list[str] = []
    reduced: list[int] = []
    model = Wide()  # its parts all begin at a multiple of 16 bytes: they are alike
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    optimizer = StableAdamW(model.parameters(), **OPTIONS)
    if released:
        release_gradients(model, optimizer)
    original = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *a, **k: (reduced.append(1), original(*a, **k))[1]
    try:
        with watched(launched.append):
            train(model, optimizer, range(1))
    finally:
        torch.distributed.all_reduce = original
    assert set(launched) == {"update_group"}
    return len(launched), len(reduced) - released


def test_shards_are_measured_in_one_launch_and_written_in_one(ranks: Ranks) -> None:
    """A step all of them, and under release those of each of four FSDP2 groups."""
    assert ranks.run(launches_and_collectives, False) == [(2, 1)] * 2
    assert ranks.run(launches_and_collectives, True) == [(2 * 4, 4)] * 2


@quietly
def together_equals_one_by_one(dtype: torch.dtype) -> None:
    models = [sharded(Net(dtype)) for _ in range(3)]
    together, alone, halves = (StableAdamW(model.parameters(), **OPTIONS) for model in models)
    for step in range(3):
        shards.given_gradients(models, step)
        together.step()
        with torch.no_grad():
            for p in all_parameters(halves) if dtype is torch.float32 else ():
                halves._refresh()
                halves._perform_all([(p, p.grad, Action.ACCUMULATE_FIRST)])
                halves._perform_all([(p, None, Action.APPLY)])
        given = {p: p.grad for p in models[1].parameters()}
        for p in given:
            alone.zero_grad()
            p.grad = given[p]
            alone.step()
    found = [[whole(x) for p in all_parameters(one) for x in (p, *one.state[p].values())] for one in (together, alone, halves)]
    assert_bitwise(found[1], found[0], "one by one")
    if dtype is torch.float32:  # in bfloat16 the moments would be rounded on the way
        assert_bitwise(found[2], found[0], "first into the moments")


@pytest.mark.parametrize("dtype", rows([torch.float32, torch.bfloat16], lambda dtype: dtype is torch.float32))
def test_shards_together_get_the_bits_of_one_by_one(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(together_equals_one_by_one, dtype)


@quietly
def as_other_backends() -> None:
    shards.steps_from_unrounded_moments("triton")
    shards.nothing_is_cut(StableAdamW, "triton")


def test_shards_are_updated_as_by_the_other_backends(ranks: Ranks) -> None:
    ranks.run(as_other_backends)


def spoil_on_one_rank(parameter: Any) -> None:
    if torch.distributed.get_rank() == 1:
        parameter.grad.to_local()[0] = float("nan")


@quietly
def shards_skip_everywhere() -> None:
    """What the device would decide of one shard, the others have to know: the host asks them."""
    for released in (False, True):
        model = sharded(Net())
        optimizer = StableAdamW(model.parameters(), on_nonfinite="skip", capturable=True, **OPTIONS)
        model.first.bias.register_post_accumulate_grad_hook(spoil_on_one_rank)
        if released:
            release_gradients(model, optimizer)
        before = parameters_of(model)
        (model(data(0)) ** 2).mean().backward()
        optimizer.step()
        skipped = {"first.bias"} if released else {name for name, _ in model.named_parameters()}
        for (name, _), old, new in zip(model.named_parameters(), before, parameters_of(model), strict=True):
            assert torch.equal(old, new) == (name in skipped), name
        assert optimizer.skipped == 1


def test_a_shard_that_is_not_finite_skips_on_every_rank(ranks: Ranks) -> None:
    ranks.run(shards_skip_everywhere)


class Wide(nn.Module):
    """Two matrices, and vectors that are small beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 48), nn.LayerNorm(48))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        return self.layers(x)


@quietly
def averaged_gradients_share_launches() -> int:
    launched: list[str] = []
    plain, model = ddp(Wide()), Wide()
    optimizers = [StableAdamW(m.parameters(), **OPTIONS) for m in (plain, model)]
    train(plain, optimizers[0], range(2))
    release = release_gradients(model, optimizers[1])
    with watched(launched.append):
        train(model, optimizers[1], range(2))
    assert_bitwise(parameters_of(model), parameters_of(plain), "release over a process group")
    assert release.ledger.live == 0
    return launched.count("update_group")


def test_averaged_gradients_that_are_small_share_a_launch(ranks: Ranks) -> None:
    """Six vectors of 192 bytes each, where three have room."""
    assert ranks.run(averaged_gradients_share_launches) == [4] * 2
