"""The whole model, forward and backward: layer after layer, and for each layer all micro-batches.

Forward, every layer saves what it needs; backward, a visitor gets each layer's gradient the moment it exists. The visitor's
arrays are the loop's carry and are written in place. One layer's gradient is alive at any time, and that of the outer
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..array_ops import widened
from ..losses import scaled_loss
from ..state import PyTree
from .fence import fenced
from .layer_pass import Cotangents, Given, Recomputed, Saved, gradient
from .layer_stack import LayerStack, number_of_layers
from .stacked import add, at, each, length, partition, put, swapped


class OfStack(NamedTuple):
    """What the forward pass leaves of one stack."""

    layer_pass: Recomputed
    layers: int
    entering: PyTree  # [micro-batches, ...]: what the previous stack returned, None for the first
    context: PyTree  # [micro-batches, ...]
    inputs: PyTree  # [layers, micro-batches, ...]
    saved: PyTree  # [layers, micro-batches, ...]


class Forward(NamedTuple):
    """What the forward pass leaves."""

    stacks: dict[str, OfStack]
    x: PyTree  # [micro-batches, ...], after the last layer
    auxiliary: dict[str, PyTree]  # [layers, micro-batches, ...]


class Head(NamedTuple):
    """The loss and where the backward pass starts."""

    loss: jax.Array  # the mean
    weight: jax.Array | None  # the total; None for a loss that is a mean
    outer: PyTree  # gradient so far, in compute dtypes
    x: PyTree  # [micro-batches, ...]
    auxiliary: dict[str, PyTree]  # [layers, micro-batches, ...]


class Visit(NamedTuple):
    """What is done with the gradient of a layer. written, read: the layer's slices of the stacked arrays of either kind.

    parameters: (written, read) -> the layer's parameters.
    update: (written, read, gradient) -> written; None: nothing is written.
    measure: (sums, gradient) -> sums; None: nothing is measured.
    """

    parameters: Callable[[PyTree, PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    measure: Callable[[PyTree, PyTree], PyTree] | None = None


def forward(stack: LayerStack, params: PyTree, batch: PyTree, save_residuals: bool) -> Forward:
    """From the batch to what the loss reads.

    Args:
        batch: with a leading axis of micro-batches.
        save_residuals: what a layer's backward pass needs is saved instead of computed a second time.
    """
    x = None
    stacks: dict[str, OfStack] = {}
    auxiliary: dict[str, PyTree] = {}
    for name, layers in stack.named(params["layers"]).items():
        stacks[name], x, outputs = _through(stack, name, params["outer"], layers, x, batch, save_residuals)
        if stack.sections[name].auxiliary:
            auxiliary[name] = outputs
    return Forward(stacks, x, auxiliary)


def _through(
    stack: LayerStack, name: str, outer: PyTree, layers: PyTree, entering: PyTree, batch: PyTree, save_residuals: bool
) -> tuple[OfStack, PyTree, PyTree]:
    """Into one stack and through its layers: what it leaves, x, and the auxiliary outputs."""
    section, count, microbatches = stack.sections[name], number_of_layers(layers), length(batch)

    def enter(_: Any, chunk: PyTree) -> tuple[Any, PyTree]:
        entering, batch = chunk
        x, context = stack.entered(name, outer, entering, batch)
        return None, (jax.tree.map(jnp.asarray, (x, context)), section.inputs_of(batch, count))

    _, ((x, context), inputs) = each(enter, None, (entering, batch), microbatches)
    inputs = swapped(inputs)
    layer_pass = Recomputed(section)
    if save_residuals:

        def first(layers: PyTree, x: PyTree, context: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree, Given]:
            return at(layers, 0), at(x, 0), Given(at(context, 0), at(at(inputs, 0), 0))

        layer_pass = Saved(section, *jax.eval_shape(first, layers, x, context, inputs))

    def run(x: PyTree, of_layer: PyTree) -> tuple[PyTree, PyTree]:
        layer, inputs = of_layer

        def one(_: Any, chunk: PyTree) -> tuple[Any, PyTree]:
            x, *given = chunk
            return None, layer_pass.forward(layer, x, Given(*given))

        _, (x, auxiliary, saved) = each(one, None, (x, context, inputs), microbatches)
        return x, (auxiliary, saved)

    x, (auxiliary, saved) = lax.scan(run, x, (layers, inputs))
    return OfStack(layer_pass, count, entering, context, inputs, saved), x, auxiliary


def head(stack: LayerStack, outer: PyTree, passed: Forward, batch: PyTree, chunks: int, seed: jax.Array | float) -> Head:
    """The mean loss, and its derivatives times seed.

    Args:
        batch: with a leading axis of micro-batches, all of them or some.
        chunks: how many micro-batches the mean is over.
        seed: the loss scale, or 1.
    """
    loss_fn = scaled_loss(stack.loss_of)

    def one(sums: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        x, auxiliary, batch = chunk

        def of(outer: PyTree, x: PyTree, auxiliary: PyTree) -> Any:
            return loss_fn(outer, x, batch, auxiliary)

        value, pullback, loss = jax.vjp(of, outer, x, auxiliary, has_aux=True)
        g, dx, d_auxiliary = pullback(jnp.asarray(seed / chunks, value.dtype))
        total, weight, scale = loss
        g = jax.tree.map(lambda leaf: widened(leaf) if scale is None else widened(leaf) * scale * chunks, g)
        sums = (total, weight, g) if sums is None else add(sums, (total, weight, g))
        return sums, (dx, d_auxiliary, scale)

    chunk = (passed.x, swapped(passed.auxiliary), batch)
    zeros = None
    if length(batch) > 1:
        kinds = jax.eval_shape(lambda chunk: one(None, at(chunk, 0))[0], chunk)
        zeros = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
    (total, weight, g), (dx, d_auxiliary, scales) = each(one, zeros, chunk, length(batch))
    if weight is None:
        return Head(total / chunks, None, g, dx, swapped(d_auxiliary))
    # Now that the total weight is known, every micro-batch gets its share: scale*chunks/weight, about 1.
    share = scales * chunks / weight

    def shared(leaf: jax.Array) -> jax.Array:
        return (widened(leaf) * share.reshape(share.shape + (1,) * (leaf.ndim - 1))).astype(leaf.dtype)

    dx, d_auxiliary = jax.tree.map(shared, (dx, d_auxiliary))
    return Head(total / weight, weight, jax.tree.map(lambda leaf: leaf / weight, g), dx, swapped(d_auxiliary))


def backward(
    stack: LayerStack,
    outer: PyTree,
    batch: PyTree,
    passed: Forward,
    start: Head,
    visit: Visit,
    written: dict[str, PyTree],
    read: dict[str, PyTree],
    sums: PyTree = None,
    *,
    fence: str,
    proceed: jax.Array | None = None,
    outer_gradient: bool = True,
) -> tuple[PyTree, dict[str, PyTree], PyTree]:
    """The reverse walk over all stacks.

    Args:
        outer: the outer parameters.
        written: by name of the stack: arrays with a layer axis that `visit.update` writes, all of them.
        read: the same for those that stay. None of them may be among those written: the old ones would have to be kept.
        sums: what `visit.measure` adds to.
        proceed: 0-d boolean: False leaves what is written as it is.
        outer_gradient: also that of the outer parameters; otherwise None.

    Returns:
        The gradient of the outer parameters in compute dtypes, what was written, and the sums.
    """
    g, dx = (start.outer if outer_gradient else None), start.x
    new: dict[str, PyTree] = {}
    for index, (name, of_stack) in reversed(list(enumerate(passed.stacks.items()))):
        cotangents, new[name], sums = _walk(
            of_stack, visit, dx, start.auxiliary.get(name), written[name], read[name], sums, fence, proceed
        )
        if index or outer_gradient:
            g, dx = _entering(stack, name, outer, batch, of_stack, cotangents, g)
    return g, new, sums


def _walk(
    of_stack: OfStack,
    visit: Visit,
    dx: PyTree,
    d_auxiliary: PyTree,
    written: PyTree,
    read: PyTree,
    sums: PyTree,
    fence: str,
    proceed: jax.Array | None,
) -> tuple[Cotangents, PyTree, PyTree]:
    """One stack, from its last layer to its first."""
    count, microbatches = of_stack.layers, length(dx)

    def body(k: jax.Array, carry: PyTree) -> PyTree:
        written, sums, cotangents = carry
        i = count - 1 - k
        old, fixed = at(written, i), at(read, i)
        layer, given = visit.parameters(old, fixed), Given(of_stack.context, at(of_stack.inputs, i))
        g, cotangents = gradient(
            of_stack.layer_pass, layer, at(of_stack.saved, i), given, cotangents, at(d_auxiliary, i), microbatches
        )
        if visit.measure is not None:
            sums = visit.measure(sums, g)
        if visit.update is not None:
            new = fenced(fence, visit.update, old, fixed, g, always=k < count, proceed=proceed)
            written = put(written, new, i)  # all of it is new: a slice written back unchanged would cost whole stacks
        return written, sums, cotangents

    floats, _ = partition(of_stack.context)
    start = Cotangents(dx, jax.tree.map(jnp.zeros_like, floats))
    written, sums, cotangents = lax.fori_loop(0, count, body, (written, sums, start))
    return cotangents, written, sums


def _entering(
    stack: LayerStack, name: str, outer: PyTree, batch: PyTree, of_stack: OfStack, cotangents: Cotangents, total: PyTree
) -> tuple[PyTree, PyTree]:
    """Backward through what leads from one stack, or the batch, into the next: (outer gradient, derivative of x)."""

    def one(total: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        entering, batch, cotangents = chunk

        def enter(outer: PyTree, entering: PyTree) -> tuple[PyTree, PyTree]:
            x, context = stack.entered(name, outer, entering, batch)
            return jax.tree.map(jnp.asarray, (x, partition(context)[0]))

        if total is None:
            _, pullback = jax.vjp(lambda entering: enter(outer, entering), entering)
            return None, pullback(tuple(cotangents))[0]
        _, pullback = jax.vjp(enter, outer, entering)
        g, dx = pullback(tuple(cotangents))
        return add(total, g), dx

    return each(one, total, (of_stack.entering, batch, cotangents), length(batch))
