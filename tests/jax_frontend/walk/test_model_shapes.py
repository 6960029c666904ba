"""Models of every shape: contexts, inputs of each layer, auxiliary outputs, several stacks, carries that are trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_training import assert_close, float64
from tests.support.jax_walk import TX, reference

from penstock.jax_frontend import Layers, LayerStack, WeightedMean, init_train_state, make_release_step

LAYERS, WIDTH, ROWS, LENGTH = 3, 4, 4, 5


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / WIDTH**0.5)


def data() -> dict[str, jax.Array]:
    return {
        "source": normal(1, ROWS, LENGTH, WIDTH),
        "target": normal(2, ROWS, LENGTH, WIDTH),
        "mask": jnp.asarray(np.random.default_rng(3).random((ROWS, LENGTH)) < 0.7),
    }


def square(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((x @ outer["head"] - batch["target"]) ** 2)


def masked() -> tuple[LayerStack, Any]:
    """Positions that are learned and a mask, both the same for all layers; a window that is each layer's own."""

    def layer(params, x, context, windows):
        positions, mask = context
        mixed = jnp.where(mask[..., None], x * windows + positions, 0.0) @ params["w"]
        return x + jnp.tanh(mixed)

    layers = Layers(
        layer,
        context=lambda outer, x, batch: (outer["positions"] * jnp.mean(x), batch["mask"]),
        inputs=lambda batch: jnp.arange(1.0, LAYERS + 1),
    )
    params = {
        "outer": {"positions": normal(4, LENGTH, WIDTH), "head": normal(5, WIDTH, WIDTH), "unused": normal(9, 2)},
        "layers": {"w": normal(6, LAYERS, WIDTH, WIDTH), "none": None},
    }
    return LayerStack(lambda outer, batch: batch["source"] @ outer["head"], layers, square), params


def routed() -> tuple[LayerStack, Any]:
    """A router in each layer, whose losses are part of the loss."""

    def layer(params, x):
        gate = jax.nn.softmax(x @ params["router"])
        return x + jnp.einsum("rte,rtd,edf->rtf", gate, x, params["experts"]), {"balance": jnp.mean(gate, (0, 1))}

    def loss(outer, x, batch, auxiliary):
        assert auxiliary["balance"].shape == (LAYERS, 2)
        return square(outer, x, batch) + 0.1 * jnp.sum(auxiliary["balance"] ** 2)

    layers = {"router": normal(1, LAYERS, WIDTH, 2), "experts": normal(2, LAYERS, 2, WIDTH, WIDTH)}
    params = {"outer": {"head": normal(5, WIDTH, WIDTH)}, "layers": layers}
    return LayerStack(lambda outer, batch: batch["source"], Layers(layer, auxiliary=True), loss), params


def translated() -> tuple[LayerStack, Any]:
    """An encoder, and a decoder of another depth whose layers all read what the encoder returned."""

    def encoder(params, x):
        return x + jnp.tanh(x @ params["w"])

    def decoder(params, x, memory):
        weights = jax.nn.softmax(x @ params["q"] @ jnp.swapaxes(memory, -1, -2))
        return x + weights @ memory, jnp.sum(x**2)

    def loss(outer, x, batch, auxiliary):
        return WeightedMean(square(outer, x, batch) + 1e-3 * auxiliary["decoder"].sum(), jnp.asarray(1.0))

    layers = {
        "encoder": encoder,
        "decoder": Layers(
            decoder,
            enter=lambda outer, x, batch: batch["target"] @ outer["head"] + x.mean(),
            context=lambda outer, x, batch: x * outer["norm"],
            auxiliary=True,
        ),
    }
    params = {
        "outer": {"norm": normal(1, WIDTH), "head": normal(5, WIDTH, WIDTH)},
        "layers": {"encoder": {"w": normal(2, 2, WIDTH, WIDTH)}, "decoder": {"q": normal(3, LAYERS, WIDTH, WIDTH)}},
    }
    return LayerStack(lambda outer, batch: batch["source"] @ outer["head"], layers, loss), params


def carried() -> tuple[LayerStack, Any]:
    """x is a tree of two arrays of different shapes; parameters are bare arrays."""

    def layer(w, x):
        a, b = x["a"], x["b"]
        return {"a": a + jnp.tanh(b)[:, None] @ w, "b": b + jnp.mean(a, 1)}

    stack = LayerStack(
        lambda outer, batch: {"a": batch["source"], "b": batch["target"][:, 0] * outer["head"][0]},
        layer,
        lambda outer, x, batch: square(outer, x["a"], batch) + jnp.mean(x["b"] ** 2),
    )
    return stack, {"outer": {"head": normal(5, WIDTH, WIDTH)}, "layers": normal(6, LAYERS, WIDTH, WIDTH)}


SAVED: dict[str, Any] = {"save_residuals": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "masked, micro-batches, clip": (masked, {"microbatches": 2, "max_norm": 0.1}),
    "masked, saved residuals": (masked, SAVED),
    "routed, micro-batches, saved residuals": (routed, {"microbatches": 2, **SAVED}),
    "translated, micro-batches, clip": (translated, {"microbatches": 2, "max_norm": 0.1}),
    "carried, saved residuals": (carried, SAVED),
}


def mean_over_chunks(stack: LayerStack, microbatches: int) -> LayerStack:
    """The reference of micro-batches where the loss is not a mean over rows: the mean over the chunks of the step."""

    class Mean:
        layer = stack.layer

        def __call__(self, params: Any, batch: Any) -> Any:
            losses = [stack(params, jax.tree.map(lambda leaf, i=i: leaf[i::microbatches], batch)) for i in range(microbatches)]
            return sum(loss.sum if isinstance(loss, WeightedMean) else loss for loss in losses) / microbatches

    return Mean()


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_gradient_and_update(case) -> None:
    model, given = CASES[case]
    with float64():
        (stack, params), batch, tx = model(), data(), TX
        step = make_release_step(stack, tx, **given)
        plain = reference(mean_over_chunks(stack, given.get("microbatches", 1)), tx, given.get("max_norm"))
        state, expected = init_train_state(tx, params, stack=stack), init_train_state(tx, params, stack=stack)
        for _ in range(2):
            state, metrics = step(state, batch)
            expected, loss, norm = plain(expected, batch)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
        assert_close(state, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("save_residuals", [False, True])
def test_a_key_is_split_over_layers_and_micro_batches(save_residuals) -> None:
    """The batch's key is split over the micro-batches, each of those over the layers; going back the masks are the same."""

    def layer(w, x, key):
        return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0.0)

    layers = Layers(layer, inputs=lambda batch: batch["key"])
    stack = LayerStack(lambda outer, batch: batch["x"], layers, lambda o, x, b: jnp.mean(x**2))
    with float64():
        params, tx = {"outer": {}, "layers": normal(1, LAYERS, WIDTH, WIDTH)}, TX
        batch = {"x": normal(2, ROWS, WIDTH), "key": jax.random.key(7)}

        def by_hand(params: Any) -> jax.Array:
            losses = []
            for i, key in enumerate(jax.random.split(batch["key"], 2)):
                x = batch["x"][i::2]
                for w, own in zip(params["layers"], jax.random.split(key, LAYERS), strict=True):
                    x = layer(w, x, own)
                losses.append(jnp.mean(x**2))
            return (losses[0] + losses[1]) / 2

        step = make_release_step(stack, tx, microbatches=2, save_residuals=save_residuals)
        _, metrics = step(init_train_state(tx, params), batch)
        loss, grads = jax.jit(jax.value_and_grad(by_hand))(params)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grads["layers"]), rtol=1e-12)


def test_a_layer_stack_returns_the_plain_loss() -> None:
    stack, params = masked()
    batch, outer = data(), params["outer"]
    x = batch["source"] @ outer["head"]
    positions = outer["positions"] * jnp.mean(x)
    for i in range(LAYERS):
        mixed = jnp.where(batch["mask"][..., None], x * (i + 1) + positions, 0.0)
        x = x + jnp.tanh(mixed @ params["layers"]["w"][i])
    np.testing.assert_allclose(jax.jit(stack)(params, batch), square(outer, x, batch), rtol=1e-5)


def test_one_micro_batch_takes_numbers_in_its_batch() -> None:
    stack = LayerStack(lambda o, b: b["x"] * b["scale"], lambda w, x: x @ w, lambda o, x, b: jnp.mean(x**2))
    params = {"outer": {}, "layers": normal(1, LAYERS, WIDTH, WIDTH)}
    batch = {"x": normal(2, ROWS, WIDTH), "scale": 0.5}
    _, metrics = make_release_step(stack, TX)(init_train_state(TX, params), batch)
    np.testing.assert_allclose(metrics["loss"], stack(params, batch), rtol=1e-5)
