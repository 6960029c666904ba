"""Every cell of the table of combinations with several processes: refused with its sentence, or compared with stock DDP.

The cells of the Triton backend are visited in processes of Triton's interpreter, and only they.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rank_models import (
    THREE,
    Net,
    assert_close,
    assert_ranks_equal,
    ddp,
    micro_batches,
    parameters_of,
    wrapped,
)
from tests.support.ranks import Ranks
from tests.support.rows import rows
from tests.support.torch_models import compiling_small_tensors
from torch import Tensor, nn

from penstock.core.combinations import AXES, Combination, Kind, Verdict, table
from penstock.core.errors import RefusedError
from penstock.torch_frontend import StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton.availability import interpreted

pytestmark = pytest.mark.xdist_group("distributed")

BACKENDS = ("triton",) if interpreted() else ("eager", "compiled")
STEPS = 1 if interpreted() else 2
MAX_NORM = 0.3
LEARNING_RATE = 0.05
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: STEPS * 2.0**-8}
"""Of the distance, relative to the tensor: the project's for a clipped run, and one rounding of the parameter a step."""


def cells(backend: str, engine: str, compensation: str) -> list[tuple[Combination, Verdict]]:
    """Those of StableAdamW with plain states. What communicates knows neither rule nor coding (test_coded_shards.py)."""
    of = (backend, engine, compensation, "plain", "squares")
    return [(c, verdict) for c, verdict in table() if (c.backend, c.communication, c.compensation, c.states, c.rule) == of]


def build(c: Combination) -> Net:
    """Interpreted, where a launch takes milliseconds, without half of the tensors; the odd shapes are there still."""
    model = Net(torch.float32 if c.compensation == "none" else torch.bfloat16)
    if interpreted():
        model.middle = nn.Identity()
        model.last.register_parameter("bias", None)
    return model


class Loop:
    """An optimizer's loop over micro-batches, with a scaler or without."""

    def __init__(self, c: Combination, model: nn.Module, backend: str) -> None:
        self.c, self.model = c, model
        self.optimizer = StableAdamW(model.parameters(), lr=LEARNING_RATE, compensation=c.compensation, backend=backend)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1, enabled=c.loss_scaling == "dynamic")
        self.count = 2 if c.accumulation == "hold" else 1  # one in the moments is exact
        self.number = 0

    def release(self) -> Any:
        c = self.c
        return release_gradients(
            self.model,
            self.optimizer,
            max_norm=None if c.clipping == "none" else MAX_NORM,
            clipping="per_tensor" if c.clipping == "per_tensor" else "exact",
            accumulation=None if c.accumulation == "none" else c.accumulation,
            scaler=self.scaler,
            sync=(lambda: self.number == self.count - 1) if c.accumulation == "hold" else None,
        )

    def run(self, guard: Callable[[Tensor], Tensor], clip: Callable[[], Any]) -> list[Tensor]:
        def before_step() -> None:
            self.scaler.unscale_(self.optimizer)
            clip()

        def step() -> None:
            self.scaler.step(self.optimizer)
            self.scaler.update()

        micro_batches(
            self.model,
            self.optimizer,
            range(STEPS),
            count=self.count,
            unsynchronised=self.c.accumulation == "hold",
            guard=lambda loss: self.scaler.scale(guard(loss)),
            before_step=before_step,
            step=step,
            on_micro_batch=lambda number: setattr(self, "number", number),
        )
        return parameters_of(self.model)


@functools.cache
def stock(c: Combination) -> list[Tensor]:
    """The plain loop over DistributedDataParallel, in eager mode."""
    model = ddp(build(c))

    def clip() -> None:
        parameters = list(model.parameters())
        groups = {"none": [], "global_norm": [parameters], "per_tensor": [[parameter] for parameter in parameters]}
        for group in groups[c.clipping]:
            torch.nn.utils.clip_grad_norm_(group, MAX_NORM)

    return Loop(c, model, "eager").run(lambda loss: loss, clip)


@np.errstate(all="ignore")  # numpy, which interprets the kernels, warns where a device does not
def visit(backend: str, engine: str, compensation: str) -> None:
    with compiling_small_tensors() if backend == "compiled" else contextlib.nullcontext():
        visit_cells(backend, engine, compensation)


def visit_cells(backend: str, engine: str, compensation: str) -> None:
    for c, verdict in cells(backend, engine, compensation):
        model = build(c)
        start = parameters_of(model)
        module = wrapped(model, engine)
        if verdict.kind is Kind.REFUSED:
            with pytest.raises(RefusedError) as raised:  # some by the optimizer already
                Loop(c, module, backend).release()
            assert str(raised.value) == verdict.why
            continue
        loop = Loop(c, module, backend)
        with loop.release() as release:
            found = loop.run(release.guard, lambda: None)
        accumulation = "hold" if c.accumulation == "hold" else "none"
        expected = stock(Combination(c.clipping, c.loss_scaling, accumulation, "ddp", c.compensation, backend="eager"))
        assert_ranks_equal(found, str(c))
        assert_close(found, expected, BOUNDS[found[0].dtype], str(c))
        moved = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, start, strict=True)]
        assert min(moved) > 2 * BOUNDS[found[0].dtype], f"{c}: a bound that a run without steps would keep"


VISITS = [(b, e, c) for b in BACKENDS for e in THREE for c in AXES["compensation"]]
ALWAYS = {("triton", *row) for row in zip(THREE, AXES["compensation"], strict=False)}
EXHAUSTIVE = {("eager", "ddp", "stochastic"), ("eager", "ddp", "split8"), ("eager", "process_group", "split8")}


@pytest.mark.parametrize(
    ("backend", "engine", "compensation"),
    rows(VISITS, lambda row: (row[0] == "eager" or row in ALWAYS) and row not in EXHAUSTIVE),
)
def test_every_cell_over_ranks_equals_stock_ddp(ranks: Ranks, backend: str, engine: str, compensation: str) -> None:
    assert len(cells(backend, engine, compensation)) == 18
    ranks.run(visit, backend, engine, compensation)


def test_every_cell_over_ranks_is_visited() -> None:
    visited = {c for row in VISITS for c, _ in cells(*row)}
    over_ranks = {c for c, _ in table() if c.communication != "local" and (c.rule, c.states) == ("squares", "plain")}
    assert visited == {c for c in over_ranks if c.backend in BACKENDS}
