"""One layer of a stack, forward and backward: its activations are recomputed, or its residuals saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..array_ops import widened
from ..dependencies import flow
from ..state import PyTree
from .layer_stack import Layers
from .stacked import add, combine, each, partition


class Given(NamedTuple):
    """What a layer reads besides its parameters and x, for one micro-batch, or with an axis of micro-batches."""

    context: PyTree
    inputs: PyTree


class Cotangents(NamedTuple):
    """Derivatives of the loss with respect to what flows through the layers; with an axis of micro-batches or without."""

    x: PyTree
    context: PyTree  # None in the places that are not floating-point


class Recomputed:
    """Saves what enters the layer, and runs it a second time going backward."""

    def __init__(self, section: Layers) -> None:
        self.section = section

    def forward(self, layer: PyTree, x: PyTree, given: Given) -> tuple[PyTree, PyTree, PyTree]:
        """(x, auxiliary, saved) of one micro-batch."""
        return (*self.section(layer, x, *given), x)

    def backward(
        self, layer: PyTree, saved: PyTree, given: Given, dx: PyTree, d_auxiliary: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The derivatives with respect to the layer's parameters, x and the context, of one micro-batch."""
        return _differentiated(self.section, layer, saved, given)[1]((dx, d_auxiliary))


class Saved(Recomputed):
    """Saves the residuals that depend on x. Those of parameters, context and inputs alone are computed again: a transposed
    or converted weight would otherwise be kept for every layer, as much memory as the parameters have."""

    def __init__(self, section: Layers, layer: PyTree, x: PyTree, given: Given) -> None:
        """layer, x, given: of one layer and one micro-batch; only their shapes and dtypes are looked at."""
        super().__init__(section)
        self._x = jax.eval_shape(lambda x: x, x)
        closed, shapes = jax.make_jaxpr(self._residuals, return_shape=True)(layer, x, given)
        first, count = len(jax.tree.leaves(layer)), len(jax.tree.leaves(x))
        marks = [int(first <= index < first + count) for index in range(len(closed.jaxpr.invars))]
        self._is_saved = [bool(mark) for mark in flow(closed.jaxpr, marks)[len(jax.tree.leaves(shapes[:2])) :]]

    def _residuals(self, layer: PyTree, x: PyTree, given: Given) -> tuple[PyTree, PyTree, list[Any]]:
        (y, auxiliary), pullback = _differentiated(self.section, layer, x, given)
        leaves, self._pullback = jax.tree.flatten(pullback)
        return y, auxiliary, leaves

    def forward(self, layer: PyTree, x: PyTree, given: Given) -> tuple[PyTree, PyTree, PyTree]:
        y, auxiliary, residuals = self._residuals(layer, x, given)
        return y, auxiliary, [leaf for leaf, saved in zip(residuals, self._is_saved, strict=True) if saved]

    def backward(
        self, layer: PyTree, saved: PyTree, given: Given, dx: PyTree, d_auxiliary: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        anything = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), self._x)
        _, _, again = self._residuals(layer, anything, given)
        kept = iter(saved)
        residuals = [next(kept) if is_saved else leaf for leaf, is_saved in zip(again, self._is_saved, strict=True)]
        return jax.tree.unflatten(self._pullback, residuals)((dx, d_auxiliary))


def _differentiated(section: Layers, layer: PyTree, x: PyTree, given: Given) -> tuple[Any, Any]:
    """jax.vjp of the layer in its parameters, x and the floating-point part of the context."""
    floats, others = partition(given.context)

    def run(layer: PyTree, x: PyTree, floats: PyTree) -> tuple[PyTree, PyTree]:
        return section(layer, x, combine(floats, others), given.inputs)

    return jax.vjp(run, layer, x, floats)


def gradient(
    layer_pass: Recomputed,
    layer: PyTree,
    saved: PyTree,
    given: Given,
    cotangents: Cotangents,
    d_auxiliary: PyTree,
    microbatches: int,
) -> tuple[PyTree, Cotangents]:
    """The gradient of one layer, summed over the micro-batches, and what goes on to the layer below.

    Args:
        layer: parameters of one layer.
        saved, given, cotangents, d_auxiliary: with a leading axis of micro-batches.

    Returns:
        The gradient, in the parameters' dtypes if there is one micro-batch, in their compute dtypes if there are several.
    """

    def one(total: PyTree, chunk: PyTree) -> tuple[PyTree, Cotangents]:
        saved, given, cotangents, d_auxiliary = chunk
        g, dx, d_context = layer_pass.backward(layer, saved, given, cotangents.x, d_auxiliary)
        return g if total is None else add(total, g), Cotangents(dx, add(cotangents.context, d_context))

    zeros = None
    if microbatches > 1:
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(widened(leaf)), layer)
    return each(one, zeros, (saved, given, cotangents, d_auxiliary), microbatches)
