"""The walk over eight devices equals the plain gradient and update, in place, and is compiled once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_sharding import ROWS, WIDTH, rows, spread, three_steps
from tests.support.jax_training import assert_close, assert_equal, float64
from tests.support.jax_walk import MASKED, STACK, batch, parameters, reference

from penstock.jax_frontend import dynamic_loss_scale, init_train_state, make_release_step, stable_adamw

TX = stable_adamw(1e-2)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


@functools.cache
def expected(stack: Any, max_norm: float | None) -> tuple[Any, ...]:
    """(state, loss, norm) after three plain steps on one device."""
    state, step = init_train_state(TX, parameters("float64", width=WIDTH)), reference(stack, TX, max_norm)
    values: tuple[Any, ...] = ()
    for _ in range(3):
        state, *values = step(state, batch(ROWS))
    return (state, *values)


@pytest.mark.parametrize(
    ("layout", "stack", "options"),
    [
        ("data parallel", STACK, {}),
        ("fsdp", STACK, {"save_residuals": True}),
        ("fsdp", MASKED, {"max_norm": 0.05, "microbatches": 2}),
    ],
    ids=["data parallel", "fsdp", "fsdp, clip, micro-batches"],
)
def test_equals_the_plain_gradient_and_update(layout: str, stack: Any, options: dict[str, Any]) -> None:
    state = init_train_state(TX, spread(parameters("float64", width=WIDTH), layout))
    state, metrics = three_steps(make_release_step(stack, TX, **options), state, rows(batch(ROWS)))
    plain, loss, norm = expected(stack, options.get("max_norm"))
    assert_close(state, plain, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose((metrics["loss"], metrics["grad_norm"]), (loss, norm), rtol=1e-12)


def test_in_state_accumulation_over_devices_equals_one_device() -> None:
    params, data = parameters("float64", width=WIDTH), batch(ROWS)
    step = make_release_step(STACK, TX, microbatches=2, accumulation="state")
    state, _ = three_steps(step, init_train_state(TX, spread(params, "fsdp")), rows(data))
    alone = init_train_state(TX, params)
    for _ in range(3):
        alone, _ = step(alone, data)
    assert_close(state, alone, rtol=1e-12, atol=1e-12)


def test_a_step_with_a_loss_scale_is_skipped_on_every_device() -> None:
    step, data = make_release_step(STACK, TX), rows(batch(ROWS))
    params = spread(parameters("float64", width=WIDTH), "fsdp")
    state, metrics = three_steps(step, init_train_state(TX, params, loss_scale=dynamic_loss_scale(2.0**10)), data)
    assert_close(state._replace(loss_scale=None), expected(STACK, None)[0], rtol=1e-12, atol=1e-12)
    assert not metrics["skipped"]

    layers = state.params["layers"]
    spoiled = {**layers, "up": layers["up"].at[1, 2, 3].set(jnp.inf)}
    state = state._replace(params={**state.params, "layers": spoiled})
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, data)
    assert metrics["skipped"]
    assert_equal(jax.tree.map(np.array, state._replace(loss_scale=None)), before._replace(loss_scale=None))
    assert float(state.loss_scale.scale) == 2.0**9
