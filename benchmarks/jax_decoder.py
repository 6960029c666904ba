"""The model of the JAX benchmarks: a decoder of equal layers with a tied head; the layers are stacked or a list."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from penstock.jax_frontend import LayerStack

Params = dict[str, Any]
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder and of its batch.

    layers, width, heads: of the transformer; the width of the feed-forward layers is 4 * width.
    context, vocabulary: number of tokens in a sequence, and of different tokens.
    dtype: of the parameters.
    """

    layers: int = 16
    width: int = 512
    heads: int = 8
    context: int = 16
    vocabulary: int = 256
    dtype: str = "float32"

    def params(self, key: Array, *, stacked: bool = True, dtype: Any = None) -> Params:
        """Return initial parameters {"outer": ..., "layers": ...}: layers stacked along a leading axis, or a list of them."""
        dtype = self.dtype if dtype is None else dtype
        outer, layers = jax.random.split(key)
        embedding = jax.random.normal(outer, (self.vocabulary, self.width), dtype) * self.width**-0.5
        keys = jax.random.split(layers, self.layers)
        made = jax.vmap(lambda key: self._layer(key, dtype))(keys) if stacked else [self._layer(key, dtype) for key in keys]
        return {"outer": {"embedding": embedding, "scale": jnp.ones(self.width, dtype)}, "layers": made}

    def _layer(self, key: Array, dtype: Any) -> Params:
        d = self.width
        shapes = {"query_key_value": (d, 3 * d), "output": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        made = {
            name: jax.random.normal(key, shape, dtype) * shape[0] ** -0.5
            for key, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
        }
        return made | {"attention_scale": jnp.ones(d, dtype), "feed_forward_scale": jnp.ones(d, dtype)}

    def batch(self, key: Array, rows: int) -> Array:
        """Return random tokens, [rows, context + 1]."""
        return jax.random.randint(key, (rows, self.context + 1), 0, self.vocabulary)

    def embed(self, outer: Params, batch: Array) -> Array:
        return outer["embedding"][batch[:, :-1]] * math.sqrt(self.width)

    def layer(self, params: Params, x: Array) -> Array:
        """Apply one block: x += attention(norm(x)), x += gelu(norm(x) up) down. x: [rows, context, width]."""
        rows, context, width = x.shape
        head = width // self.heads
        projected = normalized(x, params["attention_scale"]) @ params["query_key_value"]
        query, key, value = jnp.moveaxis(projected.reshape(rows, context, 3, self.heads, head), 2, 0)
        scores = jnp.einsum("rthd,rshd->rhts", query, key) * head**-0.5
        past = jnp.tril(jnp.ones((context, context), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        x = x + jnp.einsum("rhts,rshd->rthd", weights, value).reshape(x.shape) @ params["output"]
        return x + jax.nn.gelu(normalized(x, params["feed_forward_scale"]) @ params["up"]) @ params["down"]

    def loss(self, outer: Params, x: Array, batch: Array) -> Array:
        """Return the mean cross entropy of predicting each next token, in nats."""
        logits = normalized(x, outer["scale"]) @ outer["embedding"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1).mean()

    @property
    def stack(self) -> LayerStack:
        """The model for the reverse walk; calling it scans over its layers."""
        return LayerStack(self.embed, self.layer, self.loss)

    @property
    def rematerialised(self) -> LayerStack:
        """`stack` with layers that are recomputed in backward."""
        return LayerStack(self.embed, jax.checkpoint(self.layer), self.loss)

    def unrolled(self, params: Params, batch: Array) -> Array:
        """Return the loss of a model whose layers are a list."""
        x = self.embed(params["outer"], batch)
        for layer in params["layers"]:
            x = self.layer(layer, x)
        return self.loss(params["outer"], x, batch)


def normalized(x: Array, scale: Array) -> Array:
    """Return x divided by its root mean square along the last axis, times scale."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + EPSILON) * scale
