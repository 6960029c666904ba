"""Every cell of the table of combinations with several processes: refused with its sentence, or compared with stock DDP."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.support.rank_models import ENGINES, THREE, Net, assert_ranks_equal, ddp, micro_batches, parameters_of
from tests.support.ranks import Ranks
from torch import nn

from penstock.core.combinations import Combination, Kind, table
from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")

MAX_NORM = 0.1
LEARNING_RATE = 1e-2
STEPS = 2
BACKENDS = ("eager", "compiled")  # what "triton" refuses, it refuses before any process is asked: tests/torch_frontend


def new_model(compensation: str) -> Net:
    return Net(torch.float32 if compensation == "none" else torch.bfloat16)


def new_optimizer(c: Combination, model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=LEARNING_RATE, compensation=c.compensation, backend=c.backend)


class Scaled:
    """What a loop does with its loss and before step(), with a scaler or without."""

    def __init__(self, c: Combination, optimizer: torch.optim.Optimizer) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if c.loss_scaling == "dynamic" else None
        self.optimizer = optimizer

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def micro_batch_count(c: Combination) -> int:
    return 3 if c.accumulation == "hold" else 1


@functools.cache
def stock(c: Combination) -> list[torch.Tensor]:
    """The plain loop; `c.communication` is "ddp", and an accumulation other than "hold" is "none"."""
    model = ddp(new_model(c.compensation))
    optimizer = new_optimizer(c, model)
    scaled = Scaled(c, optimizer)

    def before_step() -> None:
        scaled.unscale()
        if c.clipping == "global_norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        elif c.clipping == "per_tensor":
            for parameter in model.parameters():
                torch.nn.utils.clip_grad_norm_([parameter], MAX_NORM)

    loop(c, model, optimizer, scaled, before_step)
    return parameters_of(model)


def loop(c: Combination, model: nn.Module, optimizer, scaled: Scaled, before_step, guard=lambda loss: loss, told=None) -> None:
    micro_batches(
        model,
        optimizer,
        range(STEPS),
        count=micro_batch_count(c),
        unsynchronised=c.accumulation == "hold",
        guard=lambda loss: scaled.loss(guard(loss)),
        before_step=before_step,
        step=scaled.step,
        on_micro_batch=told or (lambda number: None),
    )


def set_up(c: Combination):
    model = ddp(new_model(c.compensation)) if c.communication == "ddp" else ENGINES[c.communication](new_model(c.compensation))
    optimizer = new_optimizer(c, model)
    scaled = Scaled(c, optimizer)
    now = [0]
    release = release_gradients(
        model,
        optimizer,
        max_norm=None if c.clipping == "none" else MAX_NORM,
        clipping="per_tensor" if c.clipping == "per_tensor" else "exact",
        accumulation=None if c.accumulation == "none" else c.accumulation,
        sync=(lambda: now[0] == micro_batch_count(c) - 1) if c.accumulation == "hold" else None,
        scaler=scaled.scaler,
    )
    return model, optimizer, scaled, release, functools.partial(now.__setitem__, 0)


def visit(communication: str, compensation: str, backend: str) -> dict[str, int]:
    """Every cell of these; how many of each kind."""
    visited: dict[str, int] = {}
    for c, verdict in table():
        if (c.communication, c.compensation, c.backend) != (communication, compensation, backend):
            continue
        visited[verdict.kind.value] = visited.get(verdict.kind.value, 0) + 1
        if verdict.kind is Kind.REFUSED:
            with pytest.raises(RefusedError) as raised:
                set_up(c)
            assert str(raised.value) == verdict.why
            continue
        model, optimizer, scaled, release, told = set_up(c)
        loop(c, model, optimizer, scaled, scaled.unscale, release.guard, told)
        found = parameters_of(model)
        assert_ranks_equal(found, str(c))
        accumulation = "hold" if c.accumulation == "hold" else "none"  # one micro-batch in the moments is exact
        expected = stock(Combination(c.clipping, c.loss_scaling, accumulation, "ddp", c.compensation, c.backend))
        for a, b in zip(found, expected, strict=True):
            # One rounding each of the gradient (the norm is summed otherwise) or the moments, and one of the step.
            eps = torch.finfo(a.dtype).eps
            said = f"{c}: "
            torch.testing.assert_close(
                a, b, rtol=STEPS * eps, atol=STEPS * LEARNING_RATE * 4 * eps, msg=lambda text, said=said: said + text
            )
    return visited


@pytest.mark.parametrize("communication", THREE)
@pytest.mark.parametrize("compensation", ["none", "kahan", "split"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cell(ranks: Ranks, communication: str, compensation: str, backend: str) -> None:
    assert sum(ranks.run(visit, communication, compensation, backend)[0].values()) == 18
