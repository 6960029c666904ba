"""A small stacked model, and the plain gradient and update that the walk must equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from penstock.jax_frontend import LayeredState, LayerStack, TrainState, WeightedMean, stable_adamw
from penstock.jax_frontend.direct import apply_directly
from penstock.jax_frontend.walk.layer_stack import by_name, without_names

LAYERS, WIDTH, VOCABULARY, ROWS, LENGTH = 3, 6, 7, 8, 5


def layer(params: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jnp.cumsum(x, 1) / 4 @ params["up"]) @ params["down"] + params["bias"]


def embed(outer: Any, batch: Any) -> jax.Array:
    return outer["embedding"][batch["tokens"][:, :-1]] * outer["scale"].astype(outer["embedding"].dtype)


def each_loss(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
    logits = (x @ outer["embedding"].T).astype(jnp.promote_types(x.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def mean_loss(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
    return each_loss(outer, x, batch).mean()


def masked_loss(outer: Any, x: jax.Array, batch: Any) -> WeightedMean:
    return WeightedMean(jnp.sum(each_loss(outer, x, batch) * batch["mask"][:, 1:]), jnp.sum(batch["mask"][:, 1:]))


TX = stable_adamw(1e-2)
"""One object for many tests, since its separability is checked once."""

STACK = LayerStack(embed, layer, mean_loss)
MASKED = LayerStack(embed, layer, masked_loss)


def parameters(dtype: Any = "float32", layers: int = LAYERS, width: int = WIDTH) -> dict[str, Any]:
    """Tied embeddings, and an outer parameter of another kind and dtype than the rest."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape) / width**0.5, dtype)

    scale = jnp.asarray(1.3, "float32" if dtype in ("bfloat16", "float16") else dtype)
    stacked = {"up": normal(layers, width, width), "down": normal(layers, width, width), "bias": normal(layers, width)}
    return {"outer": {"embedding": normal(VOCABULARY, width), "scale": scale}, "layers": stacked}


def batch(rows: int = ROWS) -> dict[str, jax.Array]:
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, VOCABULARY, size=(rows, LENGTH + 1))
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(generator.random(tokens.shape) < 0.6)}


def own_loop(outer: Any, layers: Any, batch: Any) -> jax.Array:
    """The loss of STACK with a loop over the layers of its own, for `release_layers`."""
    x, _ = jax.lax.scan(lambda x, index: (layers(index, x), None), embed(outer, batch), layers.indices)
    return mean_loss(outer, x, batch)


def reference(loss_fn: Any, tx: Any, max_norm: float | None = None) -> Any:
    """Return (state, batch) -> (state, loss, norm): the plain gradient, optax's clipping, and the plain update.

    Args:
        loss_fn: (params, batch) -> the mean, or a `WeightedMean`; a `LayerStack` for a state with a layer axis.
        tx: updates each layer by itself where the state has a layer axis.
        max_norm: largest global norm.
    """

    def mean(params: Any, batch: Any) -> jax.Array:
        loss = loss_fn(params, batch)
        return loss.sum / loss.weight if isinstance(loss, WeightedMean) else loss

    @jax.jit
    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(mean)(state.params, batch)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
        if max_norm is not None:
            grads, _ = optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
        if isinstance(state.opt_state, LayeredState):
            return updated(loss_fn, tx, state, grads), loss, norm
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss, norm

    return step


def updated(stack: LayerStack, tx: Any, state: TrainState, grads: Any) -> TrainState:
    """Return the state after one update of the outer parameters and of each layer by itself."""
    outer, outer_state = apply_directly(tx, grads["outer"], state.opt_state.outer, state.params["outer"])
    each = jax.vmap(lambda g, s, p: apply_directly(tx, g, s, p))
    named = [by_name(stack, tree) for tree in (grads["layers"], state.opt_state.layers, state.params["layers"])]
    new = {name: each(*(tree[name] for tree in named)) for name in named[0]}
    layers, states = (without_names(stack, {name: pair[i] for name, pair in new.items()}) for i in (0, 1))
    return TrainState({"outer": outer, "layers": layers}, LayeredState(outer_state, states), state.loss_scale)
