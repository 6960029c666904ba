"""The transformer in JAX. Its formulas are those of `torch_model`, in the same order; layers are unrolled or stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..jax_frontend import LayerStack
from .settings import ModelShape

EPSILON = 1e-5  # of the layer norms


def make_loss(shape: ModelShape) -> Callable[[Mapping[str, Array], Array], Array]:
    """Return the loss function of a model of this shape.

    Returns:
        A function of the parameters, by the names of the initialisation, and a batch, int32, [batch, context + 1]: the mean
        cross entropy in nats, 0-d, of predicting each next byte.
    """

    def loss(parameters: Mapping[str, Array], batch: Array) -> Array:
        x = embedded(parameters, batch)
        for layer in range(shape.layers):
            prefix = f"layers.{layer}."
            x = apply_layer({n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}, x, shape.heads)
        return cross_entropy(parameters, x, batch)

    return loss


def layer_stack(shape: ModelShape, *, rematerialised: bool = False) -> LayerStack:
    """Return the same model of stacked layers, whose parameters are `stacked`; it may compute layers again in backward."""

    def layer(parameters: Mapping[str, Array], x: Array) -> Array:
        return apply_layer(parameters, x, shape.heads)

    return LayerStack(embed=embedded, layer=jax.checkpoint(layer) if rematerialised else layer, loss=cross_entropy)


def stacked(parameters: Mapping[str, Array], shape: ModelShape) -> dict[str, Any]:
    """Return {"outer": ..., "layers": ...} of parameters by the names of the initialisation; leaves of layers have an axis."""
    layers = [
        {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        for prefix in (f"layers.{number}." for number in range(shape.layers))
    ]
    return {
        "outer": {name: value for name, value in parameters.items() if "." not in name},
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
    }


def embedded(parameters: Mapping[str, Array], batch: Array) -> Array:
    """Return the input of the first layer, [batch, context, width]."""
    return parameters["embedding"][batch[:, :-1]] + parameters["positions"]


def cross_entropy(parameters: Mapping[str, Array], x: Array, batch: Array) -> Array:
    """Return the loss from the output of the last layer."""
    logits = normalized(x, parameters["final_scale"], parameters["final_bias"]) @ parameters["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), batch[:, 1:, None], axis=-1).mean()


def apply_layer(parameters: Mapping[str, Array], x: Array, heads: int) -> Array:
    """One block, pre-norm:  x += attention(norm(x)),  x += gelu(norm(x) W1) W2.  `x`: [batch, context, width]."""
    x = x + attention(parameters, normalized(x, parameters["attention_scale"], parameters["attention_bias"]), heads)
    hidden = normalized(x, parameters["feed_forward_scale"], parameters["feed_forward_bias"]) @ parameters["feed_forward_input"]
    return x + jax.nn.gelu(hidden, approximate=True) @ parameters["feed_forward_output"]


def attention(parameters: Mapping[str, Array], x: Array, heads: int) -> Array:
    """Causal attention, softmax((q/sqrt(d)) k^T) v, for each head. `x`: [batch, context, width]."""
    batch, context, width = x.shape
    split = (x @ parameters["query_key_value"]).reshape(batch, context, 3, heads, width // heads)
    query, key, value = split.transpose(2, 0, 3, 1, 4)
    scores = (query * (1 / math.sqrt(width // heads))) @ key.swapaxes(-1, -2)
    past = jnp.tril(jnp.ones((context, context), dtype=bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
    return (weights @ value).swapaxes(1, 2).reshape(batch, context, width) @ parameters["attention_output"]


def normalized(x: Array, scale: Array, bias: Array) -> Array:
    """Layer norm over the last axis: (x - mean)/sqrt(var + EPSILON)*scale + bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * scale + bias
