"""make_release_step: the plain gradient and one update of each layer by itself, with one layer's gradient alive."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax_support import TRANSFORMS, assert_close, assert_equal, float64
from tests.walk_support import (
    LAYERS,
    MASKED,
    STACK,
    TX,
    batch,
    each_loss,
    embed,
    layer,
    mean_loss,
    parameters,
    reference,
    updated,
)

from penstock.core.compensation import Stored, load
from penstock.jax_frontend import LayeredState, Layers, LayerStack, init_train_state, make_release_step, stable_adamw
from penstock.jax_frontend.array_ops import jax_ops

CASES = {
    "plain": (STACK, {}),
    "micro-batches": (STACK, {"microbatches": 4}),
    "clip": (STACK, {"max_norm": 0.05}),
    "no clip": (STACK, {"max_norm": 1e6, "microbatches": 2, "save_residuals": True}),
    "no fence": (STACK, {"fence": "none"}),
    "sum and weight, micro-batches, clip": (MASKED, {"microbatches": 4, "max_norm": 0.05}),
    "sum and weight, saved residuals, barrier": (MASKED, {"save_residuals": True, "fence": "barrier"}),
}


@functools.cache
def trajectory(stack: LayerStack, max_norm: float | None) -> list[Any]:
    tx, data = TX, batch()
    plain, state, steps = reference(stack, tx, max_norm), init_train_state(tx, parameters("float64")), []
    for _ in range(3):
        state, loss, norm = plain(state, data)
        steps.append((state, loss, norm))
    return steps


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_gradient_and_update_in_float64(case) -> None:
    stack, given = CASES[case]
    with float64():
        tx, data = TX, batch()
        step, state = make_release_step(stack, tx, **given), init_train_state(tx, parameters("float64"))
        for expected, loss, norm in trajectory(stack, given.get("max_norm")):
            state, metrics = step(state, data)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
            assert not metrics["skipped"]
            assert_close(state, expected, rtol=1e-12, atol=1e-12)
        assert all(metrics[name].shape == () for name in ("loss", "grad_norm", "skipped"))
        assert step.jitted._cache_size() == 1


@pytest.mark.parametrize(
    "tx",
    [
        *(TRANSFORMS[rule](optax.linear_schedule(1e-2, 0.0, 5), weight_decay=0.1) for rule in TRANSFORMS),
        optax.chain(optax.zero_nans(), optax.adaptive_grad_clip(0.1), TX),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
        optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
        optax.lamb(1e-2),
    ],
    ids=[*TRANSFORMS, "chain", "inject_hyperparams", "MultiSteps", "lamb"],
)
def test_every_separable_transform_can_be_walked(tx) -> None:
    with float64():
        params, data = parameters("float64"), batch()
        step, plain = make_release_step(STACK, tx), reference(STACK, tx)
        state, expected = init_train_state(tx, params), init_train_state(tx, params)
        for _ in range(2):
            state, _ = step(state, data)
            expected, *_ = plain(expected, data)
        assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_a_spike_in_one_layer_leaves_the_others_alone() -> None:
    tx, data, params = TX, batch(), parameters()

    @jax.custom_vjp
    def spiked(params, factor):
        """params, whose gradient is multiplied by factor."""
        return params

    spiked.defvjp(
        lambda params, factor: (params, factor),
        lambda factor, g: (jax.tree.map(lambda leaf: leaf * factor, g), jnp.zeros_like(factor)),
    )
    stack = LayerStack(
        embed,
        Layers(lambda params, x, factor: layer(spiked(params, factor), x), inputs=lambda batch: batch["factors"]),
        mean_loss,
    )
    step = make_release_step(stack, tx)
    states = []
    for factor in (1.0, 30.0):
        state = init_train_state(tx, params)
        for last in (1.0, 1.0, 1.0, factor):
            state, _ = step(state, {**data, "factors": jnp.ones(LAYERS).at[1].set(last)})
        states.append(state)
    calm, spike = (state.params for state in states)
    others = np.asarray([0, 2])
    assert_equal(
        jax.tree.map(lambda leaf: leaf[others], (spike["layers"], states[1].opt_state.layers)),
        jax.tree.map(lambda leaf: leaf[others], (calm["layers"], states[0].opt_state.layers)),
    )
    assert_equal((spike["outer"], states[1].opt_state.outer), (calm["outer"], states[0].opt_state.outer))
    assert not np.array_equal(spike["layers"]["up"][1], calm["layers"]["up"][1])


@pytest.mark.parametrize(
    ("dtype", "compensation", "digits"), [("bfloat16", "split", 22), ("bfloat16", "kahan", 15), ("float16", "kahan", 20)]
)
def test_compensated_parameters_are_what_float32_ones_would_be(dtype, compensation, digits) -> None:
    """Of a model whose gradients do not depend on its parameters; the steps are far below a spacing of the dtype."""
    stack = LayerStack(lambda o, b: b["x"], lambda p, x: x + p.astype(jnp.float32), lambda o, x, b: jnp.mean(x * b["y"]))
    generator = np.random.default_rng(0)
    data = {name: jnp.asarray(generator.normal(size=4), jnp.float32) for name in "xy"}
    start = jnp.asarray(generator.normal(size=(LAYERS, 4)), dtype)
    tx = stable_adamw(1e-5, compensation=compensation, mu_dtype=jnp.float32, nu_dtype=jnp.float32)
    after = []
    for layers in (start, start.astype(jnp.float32)):
        step, state = make_release_step(stack, tx), init_train_state(tx, {"outer": {}, "layers": layers})
        for _ in range(5):
            state, _ = step(state, data)
        after.append((state.params["layers"], state.opt_state.layers.compensation))
    (low, kept), (exact, _) = after
    assert not np.array_equal(exact, start.astype(jnp.float32))
    resolved = load(jax_ops, compensation, Stored(low, kept))
    # A float16 k cannot be nearer than half of the subnormal spacing 2^-24, in each of the five updates.
    np.testing.assert_allclose(resolved, exact, rtol=2.0**-digits, atol=5 * 2.0**-25 if dtype == "float16" else 0.0)


@pytest.mark.parametrize(("rule", "dtype"), [("stable_adamw", "bfloat16"), ("adamw", "float32"), ("adam", "bfloat16")])
def test_it_learns_donates_and_compiles_once(rule, dtype) -> None:
    tx, data, params = TRANSFORMS[rule](optax.linear_schedule(3e-2, 0.0, 30)), batch(), parameters(dtype)
    step, state, losses = make_release_step(STACK, tx, max_norm=1.0), init_train_state(tx, params), []
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    for _ in range(15):
        given = jax.tree.leaves(state)
        state, metrics = step(state, data)
        assert all(leaf.is_deleted() for leaf in given)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert step.jitted._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_counts_and_states_have_a_layer_axis() -> None:
    tx = optax.chain(optax.zero_nans(), TX)
    state = init_train_state(tx, parameters())
    assert isinstance(state.opt_state, LayeredState)
    assert all(leaf.shape[0] == LAYERS for leaf in jax.tree.leaves(state.opt_state.layers))
    state, _ = make_release_step(STACK, tx)(state, batch())
    np.testing.assert_array_equal(state.opt_state.layers[1].count, np.ones(LAYERS))
    assert state.opt_state.outer[1].count == 1


@pytest.mark.parametrize(("weight", "fence"), [(0, "conditional"), (-1, "barrier"), (float("nan"), "none")])
def test_a_weight_that_is_not_positive_skips_the_update(weight, fence) -> None:
    tx, params = TX, parameters()
    stack = LayerStack(embed, layer, lambda o, x, b: (each_loss(o, x, b).sum(), b["weight"].sum()))
    step = make_release_step(stack, tx, microbatches=2, fence=fence)
    state, metrics = step(init_train_state(tx, params), {**batch(), "weight": jnp.full(8, weight, jnp.float32)})
    assert metrics["skipped"]
    assert_equal(state, init_train_state(tx, params))
    state, metrics = step(state, {**batch(), "weight": jnp.ones(8)})
    assert not metrics["skipped"]
    assert state.opt_state.outer.count == 1


def test_gradients_are_summed_in_float32() -> None:
    """256 micro-batches: a bfloat16 sum would stop growing."""
    stack = LayerStack(lambda o, b: b[:, None], lambda p, x: x * p, lambda o, x, b: x.mean().astype(jnp.float32))
    data, tx = jnp.asarray([1.0] + [1 / 512] * 255, jnp.bfloat16), optax.sgd(1.0)
    params = {"outer": {}, "layers": jnp.ones((1,), jnp.bfloat16)}
    _, metrics = make_release_step(stack, tx, microbatches=256)(init_train_state(tx, params), data)
    np.testing.assert_allclose(metrics["grad_norm"], np.mean(np.asarray(data, np.float64)), rtol=2**-8)


def test_what_is_not_finite_propagates_through_clipping() -> None:
    tx, params, data = optax.sgd(1.0), parameters(), batch()
    params["layers"]["bias"] = params["layers"]["bias"].at[0, 0].set(jnp.nan)
    state, metrics = make_release_step(STACK, tx, max_norm=1.0)(init_train_state(tx, params), data)
    assert np.isnan(metrics["grad_norm"])
    assert not metrics["skipped"]
    assert np.isnan(np.asarray(state.params["layers"]["up"])).all()


def test_the_update_is_that_of_one_layer_outside() -> None:
    """apply_directly, vectorised over the layer axis, on the same gradients: a float32 contraction more or less."""
    tx, data, params = TX, batch(), parameters()
    state, _ = make_release_step(STACK, tx)(init_train_state(tx, params), data)
    start = init_train_state(tx, params)
    expected = jax.jit(lambda s: updated(STACK, tx, s, jax.grad(STACK)(s.params, data)))(start)
    assert_close(state, expected, rtol=2e-5, atol=1e-7)
