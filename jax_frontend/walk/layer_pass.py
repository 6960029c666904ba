"""One layer of a stack, forward and backward: its activations are recomputed, or the residuals of its backward pass saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..array_ops import upcast, zeros_of
from ..dependencies import flow
from ..state import PyTree
from .layer_stack import Layers, apply_layer
from .stacked import add, combine, partition, scan_microbatches


class LayerArguments(NamedTuple):
    """What a layer reads besides its parameters and x, of one micro-batch, or with an axis of micro-batches."""

    context: PyTree
    inputs: PyTree


class Cotangents(NamedTuple):
    """Derivatives of the loss with respect to x and the context of a layer, of one micro-batch or with an axis of them."""

    x: PyTree
    context: PyTree  # None for leaves that are not floating-point


class Recomputed:
    """A layer whose input is saved, and which runs a second time in the backward pass."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def forward(self, layer: PyTree, x: PyTree, arguments: LayerArguments) -> tuple[PyTree, PyTree, PyTree]:
        """Return (x, auxiliary, saved) of one micro-batch."""
        return (*apply_layer(self.layers, layer, x, *arguments), x)

    def backward(
        self, layer: PyTree, saved: PyTree, arguments: LayerArguments, dx: PyTree, d_auxiliary: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the derivatives with respect to the layer's parameters, x and the context, of one micro-batch."""
        return _vjp(self.layers, layer, saved, arguments)[1]((dx, d_auxiliary))


class Saved(Recomputed):
    """A layer whose residuals that depend on x are saved.

    Residuals of parameters, context and inputs alone are computed again: a transposed or converted weight would otherwise be
    kept for every layer, as much memory as the parameters take.
    """

    def __init__(self, layers: Layers, layer: PyTree, x: PyTree, arguments: LayerArguments) -> None:
        """Find which residuals depend on x.

        Args:
            layers: the stack.
            layer, x, arguments: of one layer and one micro-batch; only their shapes and dtypes are used.
        """
        super().__init__(layers)
        self._x = jax.eval_shape(lambda x: x, x)
        closed, shapes = jax.make_jaxpr(self._residuals, return_shape=True)(layer, x, arguments)
        first, count = len(jax.tree.leaves(layer)), len(jax.tree.leaves(x))
        marks = [int(first <= index < first + count) for index in range(len(closed.jaxpr.invars))]
        self._is_saved = [bool(mark) for mark in flow(closed.jaxpr, marks)[len(jax.tree.leaves(shapes[:2])) :]]

    def _residuals(self, layer: PyTree, x: PyTree, arguments: LayerArguments) -> tuple[PyTree, PyTree, list[Any]]:
        (y, auxiliary), pullback = _vjp(self.layers, layer, x, arguments)
        leaves, self._pullback = jax.tree.flatten(pullback)
        return y, auxiliary, leaves

    def forward(self, layer: PyTree, x: PyTree, arguments: LayerArguments) -> tuple[PyTree, PyTree, PyTree]:
        y, auxiliary, residuals = self._residuals(layer, x, arguments)
        return y, auxiliary, [leaf for leaf, saved in zip(residuals, self._is_saved, strict=True) if saved]

    def backward(
        self, layer: PyTree, saved: PyTree, arguments: LayerArguments, dx: PyTree, d_auxiliary: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        _, _, recomputed = self._residuals(layer, zeros_of(self._x), arguments)
        kept = iter(saved)
        residuals = [next(kept) if is_saved else leaf for leaf, is_saved in zip(recomputed, self._is_saved, strict=True)]
        return jax.tree.unflatten(self._pullback, residuals)((dx, d_auxiliary))


def _vjp(layers: Layers, layer: PyTree, x: PyTree, arguments: LayerArguments) -> tuple[Any, Any]:
    """Return jax.vjp of the layer in its parameters, x and the floating-point part of the context."""
    floats, others = partition(arguments.context)

    def run(layer: PyTree, x: PyTree, floats: PyTree) -> tuple[PyTree, PyTree]:
        return apply_layer(layers, layer, x, combine(floats, others), arguments.inputs)

    return jax.vjp(run, layer, x, floats)


def gradient(
    layer_pass: Recomputed,
    layer: PyTree,
    saved: PyTree,
    arguments: LayerArguments,
    cotangents: Cotangents,
    d_auxiliary: PyTree,
    microbatches: int,
) -> tuple[PyTree, Cotangents]:
    """Return the gradient of one layer, summed over the micro-batches, and the cotangents of the layer below.

    Args:
        layer: parameters of one layer.
        saved, arguments, cotangents, d_auxiliary: with a leading axis of micro-batches.

    Returns:
        The gradient, in the parameters' dtypes if there is one micro-batch, in their compute dtypes if there are several.
    """

    def one_microbatch(total: PyTree, chunk: PyTree) -> tuple[PyTree, Cotangents]:
        saved, arguments, cotangents, d_auxiliary = chunk
        g, dx, d_context = layer_pass.backward(layer, saved, arguments, cotangents.x, d_auxiliary)
        return g if total is None else add(total, g), Cotangents(dx, add(cotangents.context, d_context))

    zeros = None
    if microbatches > 1:
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(upcast(leaf)), layer)
    return scan_microbatches(one_microbatch, zeros, (saved, arguments, cotangents, d_auxiliary), microbatches)
