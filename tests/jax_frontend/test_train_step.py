"""make_train_step: the mean gradient of the whole batch, clipped exactly, applied once, in donated memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import assert_close, assert_equal

from penstock.jax_frontend import init_train_state, make_train_step, stable_adamw

WIDTH, LAYERS, BATCH = 6, 3, 8


def model(dtype: str = "float32", width: int = WIDTH, layers: int = LAYERS) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(width, width)) / width**0.5, dtype) for _ in range(layers)]


def batch(dtype: str = "float32", width: int = WIDTH) -> dict[str, jax.Array]:
    generator = np.random.default_rng(1)
    mask = jnp.asarray(generator.random(BATCH) < 0.6)
    return {"x": jnp.asarray(generator.normal(size=(BATCH, width)), dtype), "mask": mask}


def each_loss(params, batch) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer)
    return jnp.sum(x**2, axis=-1)


def mean_loss(params, batch) -> jax.Array:
    return jnp.mean(each_loss(params, batch))


def test_state_is_aliased_and_gradients_are_released() -> None:
    width, layers = 256, 8
    params, data, tx = model(width=width, layers=layers), batch(width=width), stable_adamw(1e-3)
    state = init_train_state(tx, params)
    analysis = make_train_step(mean_loss, tx).lower(state, data).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in params)
    assert analysis.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    # Parameters and two moments are 3; all gradients at once would make it 4.
    assert (peak - analysis.alias_size_in_bytes) / size < 3.6


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("weight", [1e-2, 3.0, 5e4, 1e6])
def test_the_sum_of_a_float16_loss_may_overflow(weight, microbatches) -> None:
    tx, size = optax.sgd(1.0), 6e4 * min(weight / 5e4, 1.0)
    data = jnp.full((2, 3), size, jnp.float16)
    step = make_train_step(lambda p, b: (jnp.sum(2 * p * b), weight / microbatches), tx, microbatches=microbatches)
    state, metrics = step(init_train_state(tx, jnp.zeros(3, jnp.float16)), data)
    expected = 4 * size / weight
    np.testing.assert_allclose(np.asarray(state.params, np.float32), -expected, rtol=2e-3)
    np.testing.assert_allclose(metrics["grad_norm"], 3**0.5 * expected, rtol=2e-3)


@pytest.mark.parametrize("size", [1e25, 3.0, 1e-15])
def test_clipping_does_not_overflow(size) -> None:
    tx, data = optax.sgd(1.0), jnp.asarray([3.0, 4.0]) * size
    step = make_train_step(lambda p, b: jnp.sum(p["a"] * b[0] + p["b"] * b[1]), tx, max_norm=size)
    state, metrics = step(init_train_state(tx, {"a": jnp.zeros(()), "b": jnp.zeros(1)}), data)
    np.testing.assert_allclose(metrics["grad_norm"], 5 * size, rtol=1e-6)
    assert_close(state.params, {"a": jnp.asarray(-0.6 * size), "b": jnp.asarray([-0.8 * size])}, rtol=1e-6)
    none = make_train_step(lambda p, b: 0.0 * jnp.sum(p), tx, max_norm=1.0)(init_train_state(tx, jnp.ones(3)), data)
    assert_equal((none[0].params, none[1]["grad_norm"]), (jnp.ones(3), jnp.zeros(())))


@pytest.mark.parametrize("tx", [stable_adamw(1e-2), optax.contrib.schedule_free_sgd(), optax.adam(1e-2)])
def test_a_state_shares_no_memory_with_the_parameters(tx) -> None:
    params = model()
    state = init_train_state(tx, params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(pointers) == len(set(pointers))
    make_train_step(mean_loss, tx)(state, batch())
    assert not any(leaf.is_deleted() for leaf in params)


def test_parameters_shared_with_the_state_are_copied() -> None:
    averaging = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    state = init_train_state(averaging, model())
    make_train_step(mean_loss, averaging)(state, batch())  # donating a buffer twice would be an error
