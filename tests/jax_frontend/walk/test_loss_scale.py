"""Loss scaling: small float16 gradients survive, an overflow changes nothing but the scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import assert_close, assert_equal, float64
from tests.support.jax_walk import MASKED, TX, batch, parameters

from penstock.jax_frontend import (
    LayerStack,
    dynamic_loss_scale,
    init_train_state,
    make_release_step,
    stable_adamw,
)


def linear(factor: float) -> LayerStack:
    """Every layer's gradient is factor/4 in each of its 4 elements, computed in float16."""
    return LayerStack(
        lambda outer, batch: batch.astype(jnp.float16),
        lambda params, x: x + params,
        lambda outer, x, batch: jnp.sum((x.astype(jnp.float32) * (factor / 4)).mean(0)),
    )


def test_a_scale_changes_nothing_in_float64() -> None:
    with float64():
        tx, data, params = TX, batch(), parameters("float64")
        step = make_release_step(MASKED, tx, microbatches=2, max_norm=0.05)
        plain, expected = step(init_train_state(tx, params), data)
        scaled, metrics = step(init_train_state(tx, params, loss_scale=2.0**10), data)
        assert_close(scaled[:2], plain[:2], rtol=1e-12, atol=1e-13)
        assert_close(metrics, expected, rtol=1e-12)
        assert scaled.loss_scale.scale == 2.0**10


def test_small_gradients_survive_only_with_a_scale() -> None:
    tx, stack, data = optax.sgd(1.0), linear(2.0**-26), jnp.zeros((2, 4))
    params = {"outer": {}, "layers": jnp.zeros((3, 4), jnp.float16)}
    lost, _ = make_release_step(stack, tx)(init_train_state(tx, params), data)
    np.testing.assert_array_equal(lost.params["layers"], 0.0)
    kept, metrics = make_release_step(stack, stable_adamw(1.0, weight_decay=0.0, eps=1e-12))(
        init_train_state(stable_adamw(1.0, weight_decay=0.0, eps=1e-12), params, loss_scale=2.0**15), data
    )
    np.testing.assert_allclose(metrics["grad_norm"], 12**0.5 * 2.0**-28, rtol=1e-3)
    np.testing.assert_allclose(kept.params["layers"], -1.0, rtol=1e-2)  # Adam's first step is the learning rate


@pytest.mark.parametrize("fence", ["conditional", "barrier"])
def test_an_overflow_changes_nothing_but_the_scale(fence) -> None:
    tx, stack, data = TX, linear(1.0), jnp.zeros((2, 4))
    params = {"outer": {"unused": jnp.ones(3)}, "layers": jnp.ones((3, 4), jnp.float16)}
    scale = dynamic_loss_scale(2.0**20, period=2)
    step, state = make_release_step(stack, tx, fence=fence), init_train_state(tx, params, loss_scale=scale)
    before, skipped = jax.tree.map(jnp.copy, state), []
    for _ in range(8):
        state, metrics = step(state, data)
        skipped.append((bool(metrics["skipped"]), float(state.loss_scale.scale)))
        if metrics["skipped"]:
            assert_equal(state[:2], before[:2])
            before = jax.tree.map(jnp.copy, state)
        else:
            break
    # The derivative of a float16 sum over two rows is scale/8; float16 ends at 65504.
    assert skipped[:-1] == [(True, 2.0 ** (19 - i)) for i in range(len(skipped) - 1)]
    assert len(skipped) > 1
    assert not skipped[-1][0]
    assert state.opt_state.outer.count == 1
    grown, _ = step(state, data)
    assert grown.loss_scale.scale == 2 * skipped[-1][1]
    assert step.jitted._cache_size() == 1


def test_a_step_without_weight_does_not_change_the_scale() -> None:
    tx, params = TX, parameters()
    data = {**batch(), "mask": jnp.zeros((8, 6), bool)}
    state = init_train_state(tx, params, loss_scale=dynamic_loss_scale(8.0, period=3))
    state, metrics = make_release_step(MASKED, tx)(state, data)
    assert metrics["skipped"]
    assert (state.loss_scale.scale, state.loss_scale.finite_steps) == (8.0, 0)


@pytest.mark.parametrize("scale", [dynamic_loss_scale(8.0, period=3, factor=4.0), 16.0])
def test_a_loss_scale_is_serialized_by_flax(scale) -> None:
    serialization = pytest.importorskip("flax.serialization")
    state = init_train_state(TX, parameters(), loss_scale=scale)
    fresh = init_train_state(TX, parameters(), loss_scale=dynamic_loss_scale() if scale != 16.0 else 2.0)
    found = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_equal(found.loss_scale, state.loss_scale)
