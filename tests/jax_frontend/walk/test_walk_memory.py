"""Memory of the walk: the state is updated in place, one layer's gradient is alive, the program does not grow with depth."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.support.jax_walk import STACK, TX, batch, embed, layer, mean_loss, parameters

from penstock.jax_frontend import LayerStack, adamw, init_train_state, make_release_step

WIDTH = 64
ADAMW = adamw(1e-3)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"microbatches": 2},
    "clip": {"max_norm": 1.0},
    "in state": {"microbatches": 3, "accumulation": "state"},
}


def compiled(
    tx: Any, layers: int, options: dict[str, Any], dtype: str = "float32", stack: LayerStack = STACK
) -> tuple[Any, Any]:
    state = jax.eval_shape(lambda: init_train_state(tx, parameters(dtype, layers, WIDTH)))
    data = batch(options.get("microbatches", 1))
    return make_release_step(stack, tx, fence="conditional", **options).lower(state, data).compile(), state


def size_of(tree: Any) -> int:
    """In bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("tx", "options"), [(ADAMW, "plain"), *((TX, options) for options in OPTIONS)], ids=["adamw, plain", *OPTIONS]
)
def test_the_state_is_updated_in_place(tx, options) -> None:
    """Temporaries: the slices of parameters, moments and gradient of one layer (4), and what the update computes of it: for
    StableAdamW a square, with micro-batches and clipping the gradient once more as it is summed and scaled."""
    layers = 32
    program, state = compiled(tx, layers, OPTIONS[options])
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes == size_of(state)
    size = size_of(state.params["layers"])
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    everything = size_of(state)
    boundaries = layers * batch(OPTIONS[options].get("microbatches", 1))["tokens"][:, 1:].size * WIDTH * 4
    beyond = peak - analysis.alias_size_in_bytes - everything - boundaries
    assert beyond <= (4 + 3) * size / layers
    assert not re.findall(rf"= f32\[{layers},{WIDTH},{WIDTH}\]\S* copy\(", program.as_text())


@pytest.mark.parametrize("options", ["plain", "clip"])
def test_low_precision_is_copied_and_converted_layer_by_layer(options: str) -> None:
    """A CPU multiplies in float32. Of a layer: slices of four arrays, the gradient (twice, clipped), weights and gradient in
    float32, and 8 bytes a parameter of the update."""
    layers = 32
    program, state = compiled(TX, layers, OPTIONS[options], "bfloat16")
    assert program.memory_analysis().alias_size_in_bytes == size_of(state)
    assert not re.findall(rf"= \w+\[{layers},{WIDTH},{WIDTH}\]\S* copy\(", program.as_text())
    boundaries = layers * batch(1)["tokens"][:, 1:].size * WIDTH * 2 * 3  # in bfloat16, and in float32
    used = program.memory_analysis().temp_size_in_bytes - boundaries
    assert used <= (4 + 2 + 2 + 2 + 4) * size_of(state.params["layers"]) / layers


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers_take_no_more_memory_than_a_scan(layers: int) -> None:
    """A plain step with layers that are recomputed and a donated state: up to one matrix, a half of a layer."""
    program, state = compiled(ADAMW, layers, {})

    def loss(params: Any, data: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, of: (jax.checkpoint(layer)(of, x), None), embed(params["outer"], data), params["layers"])
        return mean_loss(params["outer"], x, data)

    def plain(state: Any, data: Any) -> Any:
        params, opt_state, _ = state
        updates, opt_state = ADAMW.update(jax.grad(loss)(params, data), opt_state, params)
        return state._replace(params=optax.apply_updates(params, updates), opt_state=opt_state)

    unlayered = jax.eval_shape(lambda params: init_train_state(ADAMW, params, layered=False), state.params)
    scan = jax.jit(plain, donate_argnums=0).lower(unlayered, batch(1)).compile()
    assert program.memory_analysis().temp_size_in_bytes <= scan.memory_analysis().temp_size_in_bytes + WIDTH * WIDTH * 4


def test_the_outer_gradient_has_the_parameters_dtype() -> None:
    """Of tied embeddings: the head's gradient waits for that of the embeddings, which XLA adds up in float32 on a CPU."""
    tx = optax.sgd(1e-3)
    params = parameters("bfloat16", 2, WIDTH)
    params["outer"]["embedding"] = jnp.zeros((4096, WIDTH), jnp.bfloat16)
    state = jax.eval_shape(lambda: init_train_state(tx, params))
    analysis = make_release_step(STACK, tx, fence="conditional").lower(state, batch(1)).compile().memory_analysis()
    logits = 5 * 4096 * 4
    layer = size_of(state.params["layers"]) / 2
    assert analysis.temp_size_in_bytes <= (1 + 2) * params["outer"]["embedding"].nbytes + 3 * logits + 14 * layer


@jax.jit
def jitted(params: Any, x: jax.Array) -> jax.Array:
    """What is jitted hands its transposed weights on."""
    return x + jax.numpy.tanh(x @ params["up"].T) @ params["down"].T + params["bias"]


@pytest.mark.parametrize("of_layer", [layer, jitted], ids=["plain", "jitted"])
def test_saved_residuals_do_not_hold_the_parameters(of_layer) -> None:
    """Neither as they are nor transposed or cast: what depends on parameters alone is computed again."""
    layers, size = 32, WIDTH * WIDTH * 4
    program, _ = compiled(ADAMW, layers, {"save_residuals": True}, stack=LayerStack(embed, of_layer, mean_loss))
    rows = batch(1)["tokens"][:, 1:].size
    residuals = layers * 6 * rows * WIDTH * 4  # a handful of activations of each layer
    assert program.memory_analysis().temp_size_in_bytes <= residuals + 2 * 7 * size


@pytest.mark.parametrize("options", OPTIONS)
def test_the_program_does_not_grow_with_the_number_of_layers(options) -> None:
    def operations(layers: int) -> int:
        state = jax.eval_shape(lambda: init_train_state(TX, parameters(layers=layers)))
        lowered = make_release_step(STACK, TX, **OPTIONS[options]).lower(state, batch(12))
        return len(lowered.as_text().splitlines())

    assert operations(8) == operations(64)


@pytest.mark.parametrize(("fence", "operation"), [("barrier", "optimization_barrier"), ("conditional", "stablehlo.case")])
def test_both_fences_lower_for_every_platform(fence, operation) -> None:
    state, step = init_train_state(TX, parameters()), make_release_step(STACK, TX, fence=fence)
    for platform in ("cpu", "cuda", "tpu"):
        text = step.trace(state, batch()).lower(lowering_platforms=(platform,)).as_text()
        assert operation in text
