"""Every cell of the table of combinations: refused with its sentence, or trained and compared with the plain loop.

The cells of the Triton backend are visited in a process of Triton's interpreter, and only they.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.torch_models import MomentumSGD, batches, layers, loss_of
from torch import nn

from penstock.core.combinations import AXES, Combination, Kind, Verdict, table
from penstock.core.compensation import WITH_RANDOM_BITS
from penstock.core.errors import RefusedError
from penstock.torch_frontend import Lion, StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton.availability import interpreted

OPTIMIZERS: dict[str, Any] = {"squares": StableAdamW, "linear": MomentumSGD, "gradient": Lion}
"""Of each value of the axis of rules. Triton has kernels for the first only: the others cannot be constructed with it."""

HERE = [
    (c, verdict)
    for c, verdict in table()
    if c.communication == "local" and (c.rule == "squares" if interpreted() else c.backend != "triton")
    if (c.backend == "triton") == interpreted()
]
"""The others: tests/torch_frontend/communication."""


def of_kind(kind: Kind) -> list[Any]:
    """The cells of a kind; those of a slow backend that every run of the tests visits have every pair of values."""
    found = [cell for cell in HERE if cell[1].kind is kind]
    return [pytest.param(c, marks=pytest.mark.exhaustive if is_exhaustive(c[0]) else ()) for c in found]


def is_exhaustive(c: Combination) -> bool:
    """One coding is compiled; the kernels that are interpreted have one of the three at each place of the other axes.

    A rule matters where micro-batches go into its state, and so does the coding of states, which is at one place otherwise.
    Interpreted, random bits are at the place of the smallest storage.
    """
    if c.backend == "triton" and (c.states != "plain" or c.compensation in WITH_RANDOM_BITS):
        return (c.states, c.compensation, c.clipping, c.loss_scaling) != ("8bit", "stochastic", "none", "none")
    if c.states != "plain" and (c.compensation not in ("stochastic", "none") or c.backend == "compiled"):
        return True
    if c.states != "plain" and c.accumulation != "state" and c.clipping != "none":
        return True
    if c.rule != "squares" and (c.accumulation != "state" or c.backend != "eager"):
        return True
    places = [
        values.index(getattr(c, axis)) for axis, values in AXES.items() if axis not in ("communication", "backend", "rule")
    ]
    return {"eager": False, "compiled": c.compensation != "split", "triton": sum(places) % 3 > 0}[c.backend]


WIDTH = 8
LAYERS, BATCHES = (2, 3) if interpreted() else (3, 6)
MAX_NORM = 0.05
MICRO_BATCHES = 3
LEARNING_RATE = 1e-2


def identify(cell: tuple[Combination, Verdict]) -> str:
    c = cell[0]
    return "-".join(getattr(c, axis) for axis in AXES)


def model_of(c: Combination) -> nn.Module:
    model = layers(LAYERS, dtype=torch.float32 if c.compensation == "none" else torch.bfloat16)
    if c.states == "8bit":  # only large matrices have codes
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.Tanh(), nn.Linear(512, WIDTH, bias=False))
        model.append(wide.to(next(model.parameters()).dtype))
    return model


def optimizer_of(c: Combination, model: nn.Module) -> Any:
    dtype: Any = "8bit" if c.states == "8bit" else torch.float32 if c.rule == "linear" else None
    settings = {"lr": LEARNING_RATE, "compensation": c.compensation, "backend": c.backend, "state_dtype": dtype}
    if c.states == "stochastic" and c.rule == "squares":  # the others have no mean of squares
        settings |= {"state_dtype": torch.bfloat16, "betas": (0.9, 0.999)}
    return OPTIMIZERS[c.rule](model.parameters(), **settings)


def build(c: Combination) -> tuple[nn.Module, Any]:
    model = model_of(c)
    return model, optimizer_of(c, model)


def scaler_of(c: Combination) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=c.loss_scaling != "none")


def set_up(c: Combination, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler):
    return release_gradients(
        model,
        optimizer,
        max_norm=None if c.clipping == "none" else MAX_NORM,
        clipping="per_tensor" if c.clipping == "per_tensor" else "exact",
        accumulation=None if c.accumulation == "none" else c.accumulation,
        scaler=scaler,
    )


def run(model: nn.Module, optimizer: Any, scaler, count: int, guard: Callable, clip: Callable) -> None:
    """The loop that everybody writes; `clip` is what a plain one does about clipping."""
    for i, batch in enumerate(batches(BATCHES, dtype=next(model.parameters()).dtype)):
        scaler.scale(guard(loss_of(model, batch) / count)).backward()
        if (i + 1) % count == 0:
            scaler.unscale_(optimizer)
            clip()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def train_both_ways(c: Combination, micro_batches: int) -> tuple[nn.Module, nn.Module, Callable[[int], None]]:
    """A plain run, a released one, and a function that goes on with the released one, with as many micro-batches."""
    plain, optimizer = build(c)
    scaler = scaler_of(c)
    run(plain, optimizer, scaler, micro_batches, lambda loss: loss, lambda: clip_plainly(c, plain))
    model, optimizer = build(c)
    scaler = scaler_of(c)
    release = set_up(c, model, optimizer, scaler)

    def released(count: int) -> None:
        run(model, optimizer, scaler, count, release.guard, lambda: None)

    released(micro_batches)
    return plain, model, released


def clip_plainly(c: Combination, model: nn.Module) -> None:
    parameters = list(model.parameters())
    if c.clipping == "global_norm":
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    elif c.clipping == "per_tensor":
        for parameter in parameters:
            torch.nn.utils.clip_grad_norm_([parameter], MAX_NORM)


def assert_within_one_rounding_a_step(c: Combination, a: torch.Tensor, b: torch.Tensor) -> None:
    """What goes into each of six steps (gradient or moments) is rounded once differently.

    So each step, of about lr, is off by two such factors, and may send the parameter to the neighbouring number. Where moments
    are coded, another code may be chosen, which changes a step by at most its size.
    """
    eps = torch.finfo(a.dtype).eps
    torch.testing.assert_close(a, b, rtol=6 * eps, atol=6 * LEARNING_RATE * (2 * eps if c.states == "plain" else 1))


@pytest.mark.parametrize("cell", [cell for cell in HERE if cell[1].kind is Kind.REFUSED], ids=identify)
def test_a_refused_cell_is_refused_before_anything_changes(cell) -> None:
    c, verdict = cell
    model = model_of(c)
    with pytest.raises(RefusedError) as raised:  # some by the optimizer already
        set_up(c, model, optimizer_of(c, model), scaler_of(c))
    assert str(raised.value) == verdict.why
    loss_of(model, batches(1, dtype=next(model.parameters()).dtype)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())  # no hook was left behind


@pytest.mark.parametrize("cell", of_kind(Kind.EXACT), ids=identify)
def test_an_exact_cell_equals_the_plain_loop(cell) -> None:
    c, _ = cell
    plain, model, _ = train_both_ways(c, 1 if c.accumulation == "none" else MICRO_BATCHES)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        if c.clipping == "none" and c.accumulation != "state":
            assert torch.equal(a, b)
        else:
            # Micro-batches are summed in the momentum instead of in .grad; or the norm is taken in float32 instead of the
            # gradient's dtype, and in another order
            assert_within_one_rounding_a_step(c, a, b)


@pytest.mark.parametrize("cell", of_kind(Kind.APPROXIMATE), ids=identify)
def test_an_approximate_cell_is_exact_with_one_micro_batch_and_trains_with_several(cell) -> None:
    c, _ = cell
    plain, model, go_on = train_both_ways(c, 1)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        # step() applies moments that were rounded to their dtype in between.
        assert_within_one_rounding_a_step(c, a, b)
    before = loss_of(model, batches(1, dtype=next(model.parameters()).dtype)[0])
    for _ in range(5):
        go_on(MICRO_BATCHES)
    assert loss_of(model, batches(1, dtype=next(model.parameters()).dtype)[0]) < before
