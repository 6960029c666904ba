"""Every cell of the table of combinations that several processes can have: trained, and compared with stock DDP.

With StableAdamW, whose shards have to meet, in one backend: `test_combinations_over_ranks` has the others. The cells of the
Triton backend are visited in processes of Triton's interpreter, started by `backends/triton/test_backend.py`, and only they.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.rank_models import ENGINES, THREE, Net, assert_close, assert_ranks_equal, data, ddp, loss_of, parameters_of
from tests.support.ranks import Ranks
from torch import Tensor, nn

from penstock.core.combinations import AXES, Combination, Kind, table
from penstock.torch_frontend import StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton.availability import interpreted

pytestmark = pytest.mark.xdist_group("distributed")

BACKEND = "triton" if interpreted() else "eager"
STEPS = 1 if interpreted() else 3
MAX_NORM = 0.3
LEARNING_RATE = 0.05

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: STEPS * 2.0**-8}
"""Of the distance, relative to the tensor: the project's for a clipped run, and one rounding of the parameter a step."""


def cells(engine: str, accumulation: str) -> list[Combination]:
    """Those that are not refused; the refused ones are visited where no processes are needed."""
    found = [c for c, verdict in table() if verdict.kind is not Kind.REFUSED and c.backend == BACKEND]
    return [c for c in found if (c.communication, c.accumulation) == (engine, accumulation)]


def build(c: Combination) -> tuple[Net, torch.dtype]:
    """Interpreted, where a launch takes milliseconds, without half of the tensors; the odd shapes are there still."""
    dtype = torch.float32 if c.compensation == "none" else torch.bfloat16
    model = Net(dtype)
    if interpreted():
        model.middle = nn.Identity()
        model.last.register_parameter("bias", None)
    return model, dtype


def run(c: Combination, model: nn.Module, dtype: torch.dtype, release_it: bool) -> list[Tensor]:
    """The loop that everybody writes. With accumulation="state" one micro-batch a step, where it is exact."""
    backend = c.backend if release_it else "eager"
    optimizer = StableAdamW(model.parameters(), lr=LEARNING_RATE, compensation=c.compensation, backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2, enabled=c.loss_scaling == "dynamic")
    count = 2 if c.accumulation == "hold" else 1
    now = {"last": False}
    release = None
    if release_it:
        release = release_gradients(
            model,
            optimizer,
            max_norm=None if c.clipping == "none" else MAX_NORM,
            clipping="per_tensor" if c.clipping == "per_tensor" else "exact",
            accumulation=None if c.accumulation == "none" else c.accumulation,
            scaler=scaler,
            sync=(lambda: now["last"]) if c.accumulation == "hold" else None,
        )
    for step in range(STEPS):
        for number in range(count):
            now["last"] = number == count - 1
            loss = loss_of(model, data(count * step + number, dtype=dtype)) / count
            scaler.scale(release.guard(loss) if release else loss).backward()
        scaler.unscale_(optimizer)
        if not release:
            clip(c, list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = parameters_of(model)
    if release:
        release.remove()
    return found


def clip(c: Combination, parameters: list[Tensor]) -> None:
    if c.clipping == "global_norm":
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    elif c.clipping == "per_tensor":
        for parameter in parameters:
            torch.nn.utils.clip_grad_norm_([parameter], MAX_NORM)


@np.errstate(all="ignore")  # numpy, which interprets the kernels, warns where a device does not
def visit(engine: str, accumulation: str) -> int:
    for c in cells(engine, accumulation):
        model, dtype = build(c)
        expected = run(c, ddp(model), dtype, release_it=False)
        model, dtype = build(c)
        start = parameters_of(model)
        found = run(c, ddp(model) if engine == "ddp" else ENGINES[engine](model), dtype, release_it=True)
        assert_ranks_equal(found, str(c))
        assert_close(found, expected, BOUNDS[dtype], str(c))
        moved = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, start, strict=True)]
        assert min(moved) > 2 * BOUNDS[dtype], f"{c}: a bound that a run without steps would keep"
    return len(cells(engine, accumulation))


@pytest.mark.parametrize("engine", THREE)
@pytest.mark.parametrize("accumulation", AXES["accumulation"])
def test_every_cell_over_ranks_equals_stock_ddp(ranks: Ranks, engine: str, accumulation: str) -> None:
    visited = ranks.run(visit, engine, accumulation)
    assert visited == [len(cells(engine, accumulation))] * 2
    assert visited[0] > 0
