"""release_layers updates each layer exactly once, in the backward pass of a loop that the caller wrote."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from tests.support.jax_sharding import rows, spread, three_steps
from tests.support.jax_training import assert_close, assert_equal, float64

from penstock.core.errors import RefusedError
from penstock.jax_frontend import LayerStack, init_train_state, make_release_step, release_layers, stable_adamw

needs_references = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no jax.new_ref")
LAYERS, WIDTH, ROWS = 4, 6, 3
TX = stable_adamw(1e-2)


def parameters(dtype: str = "float32", layers: int = LAYERS, width: int = WIDTH) -> dict:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape) / width**0.5, dtype)

    return {
        "outer": {"embedding": normal(5, width)},
        "layers": {"kernel": normal(layers, width, width), "bias": normal(layers, width)},
    }


def tokens(seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 5, ROWS), jnp.int32)


def embed(outer, batch) -> jax.Array:
    return outer["embedding"][batch]


def layer(params, x) -> jax.Array:
    return x + jnp.tanh(x @ params["kernel"] + params["bias"])


def head(outer, x, batch) -> jax.Array:
    logits = x @ outer["embedding"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, None], axis=1))


def loss(outer, layers, batch) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, index: (layers(index, x), None), embed(outer, batch), layers.indices)
    return head(outer, x, batch)


@functools.partial(jax.jit, static_argnames=("tx", "loss", "layer"))
def plain_step(tx, state, batch, loss=loss, layer=layer):
    """The gradient as a whole, and one update of each layer by itself."""

    def whole(params):
        def call(index, *inputs):
            return layer(jax.tree.map(lambda leaf: leaf[index], params["layers"]), *inputs)

        call.indices = jnp.arange(LAYERS)
        return loss(params["outer"], call, batch)

    def update(g, opt_state, p):
        updates, opt_state = tx.update(g, opt_state, p)
        return optax.apply_updates(p, updates), opt_state

    value, g = jax.value_and_grad(whole)(state.params)
    outer, of_outer = update(g["outer"], state.opt_state.outer, state.params["outer"])
    layers, of_layers = jax.vmap(update)(g["layers"], state.opt_state.layers, state.params["layers"])
    return (
        type(state)({"outer": outer, "layers": layers}, type(state.opt_state)(of_outer, of_layers)),
        value,
        jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(g))),
    )


def compare(loss, layer, batch, tx=TX, steps=3) -> None:
    """In float64; call it within `float64()`."""
    params = parameters("float64")
    step, state, expected = release_layers(loss, layer, tx), init_train_state(tx, params), init_train_state(tx, params)
    for _ in range(steps):
        state, metrics = step(state, batch)
        expected, value, norm = plain_step(tx, expected, batch, loss, layer)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
        assert not metrics["skipped"]
    assert_close(state, expected, rtol=1e-12, atol=1e-14)


@needs_references
def test_a_loop_in_any_order_with_more_inputs_and_outputs_equals_the_plain_step() -> None:
    def dropping(params, state, key, keep):
        x, seen = state["x"], state["seen"]
        kept = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0)
        return {"x": layer(params, kept) * keep, "seen": seen + 1}, jnp.mean(x**2)

    def own_loop(outer, layers, batch):
        state = {"x": embed(outer, batch["tokens"]), "seen": jnp.zeros((), jnp.int32)}
        penalty = 0.0
        for index, key in zip((2, 0), jax.random.split(batch["key"], 2), strict=True):
            state, square = layers(index, state, key, batch["keep"])
            penalty += square * outer["embedding"][0, 0]

        @jax.checkpoint
        def body(state, given):
            state, square = layers(given[0], state, given[1], batch["keep"])
            return state, square

        remaining = jnp.asarray([3, 1], jnp.int32)
        state, squares = jax.lax.scan(body, state, (remaining, jax.random.split(batch["key"], 2)), reverse=True)
        return head(outer, state["x"], batch["tokens"]) + 0.1 * (penalty + jnp.sum(squares)) + 0.0 * state["seen"]

    with float64():
        batch = {"tokens": tokens(), "key": jax.random.key(3), "keep": jnp.ones((ROWS, 1))}
        compare(own_loop, dropping, batch)


@needs_references
def test_a_layer_may_be_read_before_its_update_under_stop_gradient() -> None:
    """Outside of jax.checkpoint nothing is read again; inside, a call that comes before the trained one is read before it."""

    def frozen_too(outer, layers, batch):
        x = embed(outer, batch)
        x = x + jax.lax.stop_gradient(layers(3, x))
        x = x + jax.checkpoint(lambda x: jax.lax.stop_gradient(layers(0, x)))(x)
        return loss({"embedding": outer["embedding"] + jnp.mean(x)}, layers, batch)

    with float64():
        compare(frozen_too, layer, tokens())


@needs_references
def test_layers_are_updated_whatever_else_is_differentiated() -> None:
    def frozen(outer, layers, batch):
        return loss(jax.lax.stop_gradient(outer), layers, batch)

    with float64():
        compare(frozen, layer, tokens())
        compare(lambda outer, layers, batch: loss(parameters("float64")["outer"], layers, batch), layer, tokens())


@needs_references
def test_equals_the_walk_in_low_precision() -> None:
    """The same updates of the same gradients; only sums may be grouped differently."""
    stack = LayerStack(embed, layer, head)
    results = []
    for step in (release_layers(loss, layer, TX), make_release_step(stack, TX)):
        state, losses = init_train_state(TX, parameters("bfloat16")), []
        for seed in range(4):
            state, metrics = step(state, tokens(seed))
            losses.append(metrics["loss"])
        results.append((state.params, losses))
    assert_close(*results, rtol=2**-6, atol=2**-8)


@needs_references
def test_one_layers_gradient_is_alive() -> None:
    layers, width = 16, 128
    state = jax.eval_shape(lambda: init_train_state(TX, parameters(layers=layers, width=width)))
    batch = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
    peaks = []
    for step in (release_layers(loss, layer, TX), make_release_step(LayerStack(embed, layer, head), TX)):
        analysis = step.lower(state, batch).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        peaks.append((peak - analysis.alias_size_in_bytes) / size)
    # Parameters and two moments are 3; a layer's parameters, moments and gradient are 4/16.
    assert peaks[0] < 3.5
    assert peaks[0] < peaks[1] + 0.02


@needs_references
def test_a_sharded_loop_equals_one_device() -> None:
    with float64():
        params, step = parameters("float64", width=16), release_layers(loss, layer, TX)
        data = jnp.asarray(np.random.default_rng(1).integers(0, 5, 16), jnp.int32)
        state, _ = three_steps(step, init_train_state(TX, spread(params, "fsdp")), rows(data))
        alone = init_train_state(TX, params)
        for _ in range(3):
            alone, _ = step(alone, data)
        assert_close(state, alone, rtol=1e-12, atol=1e-12)


def scanned(body, batch_to_indices=None):
    def loss(outer, layers, batch):
        indices = layers.indices if batch_to_indices is None else batch_to_indices(layers.indices, batch)
        x, _ = jax.lax.scan(lambda x, index: (body(layers, index, x, batch), None), embed(outer, batch), indices)
        return head(outer, x, batch)

    return loss


def one_more(index):
    """All layers, and one that is not there: reading it would be reading the last one."""
    return scanned(lambda layers, i, x, _: layers(i, x), lambda indices, _: jnp.append(indices, index))


def of_the_input(outer, layers, batch) -> jax.Array:
    """The derivative by what enters the layers, which depends on no parameter outside of them."""
    x = jax.nn.one_hot(batch, WIDTH)
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda x, i: (layers(i, x), None), x, layers.indices)[0]))(x)


def adversarial(outer, layers, batch) -> jax.Array:
    x = jax.nn.one_hot(batch, WIDTH) + 0.1 * jnp.sign(of_the_input(outer, layers, batch))
    return head(outer, jax.lax.scan(lambda x, i: (layers(i, x), None), x, layers.indices)[0], batch)


REFUSED = {
    "twice": (scanned(lambda layers, i, x, _: layers(jnp.minimum(i, 2), x)), "reaches layer 2 2 times"),
    "tied": (scanned(lambda layers, i, x, _: layers(i, layers(i, x))), "reaches layer 0 2 times"),
    "vmapped": (scanned(lambda layers, i, x, _: jax.vmap(lambda row: layers(i, row))(x)), "called under jax.vmap"),
    "left out": (scanned(lambda layers, i, x, _: layers(i, x), lambda indices, _: indices[:-1]), "never reaches layer 3"),
    "too high": (one_more(LAYERS), r"a layer that does not exist.* in \[0, 4\)"),
    "negative": (one_more(-1), "a layer that does not exist"),
    "stopped": (
        scanned(lambda layers, i, x, _: jax.lax.stop_gradient(layers(i, x))),
        "never reaches layer 0.*stop_gradient",
    ),
    "chosen": (scanned(lambda layers, i, x, _: layers(i, x), lambda indices, batch: indices + batch[0]), "batch decides"),
    "skipped": (
        scanned(lambda layers, i, x, b: jax.lax.cond(b[0] > i, lambda: layers(i, x), lambda: x)),
        "inside of lax.cond.* multiply what it adds by 0",
    ),
    "in both branches": (
        scanned(lambda layers, i, x, _: jax.lax.cond(i > 1, lambda: layers(i, x), lambda: layers(i, 2 * x))),
        "inside of lax.cond",
    ),
    "differentiated by the loss": (
        lambda outer, layers, batch: adversarial(outer, layers, batch),
        "differentiates layer 0 itself",
    ),
    "differentiated by the loss alone": (
        lambda outer, layers, batch: jnp.sum(outer["embedding"]) * jnp.sum(of_the_input(outer, layers, batch)),
        "differentiates layer 0 itself.*from state.params",
    ),
    "forward mode": (
        lambda outer, layers, batch: jax.jvp(
            lambda x: loss({"embedding": outer["embedding"] + x}, layers, batch), (0.0,), (1.0,)
        )[1],
        "jax.jvp",
    ),
    "read under stop_gradient in a checkpoint after its update": (
        scanned(
            jax.checkpoint(lambda layers, i, x, _: layers(i, x + jax.lax.stop_gradient(layers(3 - i, x))), static_argnums=0)
        ),
        "reads layer 2 again after its update",
    ),
    "chosen by a parameter": (
        lambda outer, layers, batch: jnp.mean(layers(jnp.int32(outer["embedding"][0, 0] > 0), embed(outer, batch))),
        "outer decides",
    ),
}


@needs_references
@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_not_used_exactly_once_is_refused_before_anything_changes(name) -> None:
    wrong, text = REFUSED[name]
    state = init_train_state(TX, parameters())
    before = jax.tree.map(jnp.copy, state)
    with pytest.raises(RefusedError, match=text):
        release_layers(wrong, layer, TX)(state, tokens())
    assert_equal(state, before)


@needs_references
def test_a_layer_can_be_dropped_by_the_data_when_it_is_still_used() -> None:
    def drop(outer, layers, batch):
        def body(x, index):
            return x + (layers(index, x) - x) * (index < batch[0] + 1), None

        return head(outer, jax.lax.scan(body, embed(outer, batch), layers.indices)[0], batch)

    with float64():
        compare(drop, layer, tokens())


@needs_references
def test_what_the_loss_and_the_schedule_log_is_of_steps_and_nothing_else() -> None:
    """The visits are counted, and separability is checked, by running both on stand-ins, of which nothing may be logged."""
    losses, rates, drawn = [], [], []

    def logging(outer, layers, batch):
        noise = io_callback(lambda: drawn.append(0.0) or np.float32(0.0), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)
        value = loss(outer, layers, batch) + jax.lax.stop_gradient(noise)
        jax.lax.cond(value > 0, lambda: jax.debug.callback(lambda x: losses.append(float(x)), value), lambda: None)
        return value

    def schedule(count):
        jax.debug.callback(lambda x: rates.append(int(x)), count)
        return 1e-2

    tx = optax.sgd(schedule)
    step, state = release_layers(logging, layer, tx), init_train_state(tx, parameters())
    state, metrics = step(state, tokens())
    jax.effects_barrier()
    assert losses == [float(metrics["loss"])]
    assert rates == [0] * (1 + LAYERS)
    assert drawn == [0.0]


@needs_references
def test_a_step_runs_without_jit() -> None:
    params = parameters(layers=2, width=2)
    tx = optax.sgd(1e-2)
    state, _ = release_layers(loss, layer, tx)(init_train_state(tx, params), tokens())
    with jax.disable_jit():
        other, _ = release_layers(loss, layer, optax.sgd(1e-2))(init_train_state(tx, params), tokens())
    assert_close(other, state, rtol=1e-6, atol=1e-7)
