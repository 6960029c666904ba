"""make_train_step: exact clipping in two backward passes that hold no gradients, and a state in memory of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.jax_decoder import Decoder
from tests.support.jax_training import assert_close, assert_equal

from penstock.jax_frontend import TrainState, WeightedMean, init_train_state, make_train_step, stable_adamw

LAYERS, WIDTH, ROWS = 12, 256, 4
TX = stable_adamw(1e-2)


def loss(params, batch) -> jax.Array:
    """With activations that need their inputs, outputs and derivatives to go backward."""
    x = batch if jnp.issubdtype(batch.dtype, jnp.floating) else jnp.sin(batch.astype(jnp.float32))
    for layer in params:
        x = x + jnp.tanh(x @ layer)
    return jnp.mean(x**2)


def loss_and_weight(params, batch) -> WeightedMean:
    return WeightedMean(ROWS * loss(params, batch), jnp.asarray(ROWS))


PARAMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS


def parameters() -> list[jax.Array]:
    return [jnp.asarray(np.random.default_rng(layer).normal(size=(6, 6)), jnp.float32) for layer in range(3)]


class Cost:
    """Of a compiled step: the peak of its memory in units of the parameters' bytes, its FLOPs."""

    def __init__(self, batch=(ROWS, WIDTH), dtype: str = "float32", loss=loss, params=PARAMS, **options) -> None:
        state = jax.eval_shape(lambda p: TrainState(p, TX.init(p)), params)
        batch = jax.ShapeDtypeStruct(batch, dtype)
        compiled = make_train_step(loss, TX, **options).lower(state, batch).compile()
        memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        self.peak = (peak - memory.alias_size_in_bytes) / sum(4 * leaf.size for leaf in jax.tree.leaves(params))
        self.flops = (costs[0] if isinstance(costs, list) else costs)["flops"]
        self.all_aliased = memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_two_passes_are_not_merged_and_hold_no_gradients(dtype) -> None:
    plain, once, twice = (
        Cost(dtype=dtype, **options) for options in ({}, {"max_norm": 1.0, "clip_passes": 1}, {"max_norm": 1.0})
    )
    # Forward, backward by the activations, backward by the parameters are a matrix product each: 3 a layer, 5 with the
    # second backward pass. The rest of the arithmetic, the update, is the same.
    products = 3 * 2 * ROWS * WIDTH**2 * LAYERS
    assert twice.flops - once.flops > 0.9 * (2 / 3) * products
    # The floor is 3: parameters and two moments. Twelve layers have 1/12 of a gradient more alive at a time.
    assert plain.peak < 3.3
    assert twice.peak < plain.peak + 0.1
    assert once.peak > 3.9
    assert plain.all_aliased
    assert twice.all_aliased


def test_a_decoder_is_clipped_in_the_memory_of_its_plain_step() -> None:
    """Parameters and moments are 3; two layers' gradients are alive, 2/8, and activations and the embedding's are below 0.1."""
    decoder = Decoder(layers=8)
    params = jax.eval_shape(lambda key: decoder.params(key, stacked=False), jax.random.key(0))
    clipped = Cost((1, decoder.context + 1), "int32", decoder.unrolled, params, max_norm=1.0)
    assert clipped.peak < 3 + 2 / 8 + 0.1
    assert clipped.all_aliased


def test_two_passes_of_a_weighted_loss_hold_no_gradients() -> None:
    twice = Cost(loss=loss_and_weight, max_norm=1.0)
    assert twice.peak < 3.6  # the old values wait for whether the step is skipped
    assert twice.all_aliased


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("weight", [1e-2, 3.0, 5e4, 1e6])
def test_the_sum_of_a_float16_loss_may_overflow(weight, microbatches) -> None:
    tx, size = optax.sgd(1.0), 6e4 * min(weight / 5e4, 1.0)
    data = jnp.full((2, 3), size, jnp.float16)
    step = make_train_step(lambda p, b: WeightedMean(jnp.sum(2 * p * b), weight / microbatches), tx, microbatches=microbatches)
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
    params = parameters()
    state = init_train_state(tx, params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(pointers) == len(set(pointers))
    make_train_step(loss, tx)(state, jnp.ones((ROWS, 6)))
    assert not any(leaf.is_deleted() for leaf in params)


def test_parameters_shared_with_the_state_are_copied() -> None:
    averaging = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    state = init_train_state(averaging, parameters())
    make_train_step(loss, averaging)(state, jnp.ones((ROWS, 6)))  # donating a buffer twice would be an error
