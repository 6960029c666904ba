"""make_release_step: the plain gradient and one update of each layer by itself, with one layer's gradient alive."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, float64
from tests.support.jax_walk import (
    LAYERS,
    MASKED,
    STACK,
    TX,
    batch,
    embed,
    layer,
    mean_loss,
    parameters,
    reference,
    updated,
)
from tests.support.rows import rows

from penstock.core.compensation import Stored, load
from penstock.jax_frontend import (
    LayeredState,
    Layers,
    LayerStack,
    init_train_state,
    make_release_step,
    muon,
    param_labels_for_muon,
    stable_adamw,
)
from penstock.jax_frontend.array_ops import jax_ops

WALKED = {
    **{rule: make(optax.linear_schedule(1e-2, 0.0, 5), weight_decay=0.1) for rule, make in TRANSFORMS.items()},
    "chain": optax.chain(optax.zero_nans(), optax.adaptive_grad_clip(0.1), TX),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "MultiSteps": optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
    "lamb": optax.lamb(1e-2),
    "muon": optax.partition({"muon": muon(1e-2, ns_dtype="float32"), "adamw": optax.adamw(1e-2)}, param_labels_for_muon),
}


@pytest.mark.parametrize(
    "name", rows(WALKED, lambda name: name not in ("adamw", "adam", "lion", "sgd", "sgd_momentum", "radam"))
)
def test_every_separable_transform_can_be_walked(name: str) -> None:
    """On a small model: what the transform does is the same on any."""
    tx = WALKED[name]
    stack = LayerStack(lambda o, b: b * o["scale"], lambda p, x: x + jnp.tanh(x @ p), lambda o, x, b: jnp.mean((x - 1) ** 2))
    with float64():
        data = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)))
        params = {"outer": {"scale": jnp.ones(4)}, "layers": jnp.asarray(np.random.default_rng(2).normal(size=(3, 4, 4)))}
        step, plain = make_release_step(stack, tx), reference(stack, tx)
        state, expected = init_train_state(tx, params), init_train_state(tx, params)
        assert isinstance(state.opt_state, LayeredState)
        assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state.opt_state.layers))  # counts, too
        for _ in range(2):
            state, _ = step(state, data)
            expected, *_ = plain(expected, data)
        assert_close(state, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layers", "stack", "options"),
    [(1, STACK, {}), (2, STACK, {}), (2, MASKED, {"microbatches": 4, "max_norm": 0.05})],
    ids=["one", "two", "two, sum and weight, micro-batches, clip"],
)
def test_few_layers_are_updated_at_once_to_the_same_numbers(layers, stack, options) -> None:
    with float64():
        params = parameters("float64", layers)
        step, plain = make_release_step(stack, TX, **options), reference(stack, TX, options.get("max_norm"))
        state, expected = init_train_state(TX, params), init_train_state(TX, params)
        for _ in range(2):
            state, metrics = step(state, batch())
            expected, _, norm = plain(expected, batch())
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
        assert_close(state, expected, rtol=1e-11, atol=1e-12)


def test_a_spike_in_one_layer_changes_no_other() -> None:
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
def test_compensated_parameters_equal_float32_parameters(dtype, compensation, digits) -> None:
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


def test_the_update_equals_that_of_a_layer_outside_of_the_walk() -> None:
    """apply_directly, vectorised over the layer axis, on the same gradients: a float32 contraction more or less."""
    tx, data, params = TX, batch(), parameters()
    state, _ = make_release_step(STACK, tx)(init_train_state(tx, params), data)
    start = init_train_state(tx, params)
    expected = jax.jit(lambda s: updated(STACK, tx, s, jax.grad(STACK)(s.params, data)))(start)
    assert_close(state, expected, rtol=2e-5, atol=1e-7)
