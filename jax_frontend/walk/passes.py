"""The whole model, forward and backward: layer after layer, and for each layer all micro-batches.

The forward pass saves what each layer's backward pass needs. The backward pass calls `update` with each layer's gradient as
soon as it exists; the arrays that `update` writes are the loop's carry, and XLA writes them in place. Alive at any time are
one layer's gradient and that of the outer parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..array_ops import upcast, zeros_of
from ..losses import scaled_loss
from ..state import PyTree
from .fence import added_after, fenced, read_at
from .layer_pass import Cotangents, LayerArguments, Recomputed, Saved, gradient
from .layer_stack import LayerStack, by_name, enter_stack, layer_inputs, model_loss, number_of_layers, stacks_of
from .stacked import add, at, length, partition, put, scan_microbatches, swap_leading_axes

Arrays = dict[str, PyTree]
"""Arrays of the layers of a stack by what they are, such as "params" and "opt_state"; of all layers, or of one."""

Update = Callable[[Arrays, PyTree], Arrays]
"""(arrays of one layer, its gradient) -> those of the arrays that are written."""

Measure = Callable[[PyTree, PyTree], PyTree]
"""(sums so far, gradient of one layer) -> sums."""


class StackForward(NamedTuple):
    """What the forward pass saves of one stack."""

    layer_pass: Recomputed
    layers: int
    entering: PyTree  # [micro-batches, ...]: what the previous stack returned, None for the first
    context: PyTree  # [micro-batches, ...]
    inputs: PyTree  # [layers, micro-batches, ...]
    saved: PyTree  # [layers, micro-batches, ...]


class Forward(NamedTuple):
    """What the forward pass saves of all stacks, and what the loss reads."""

    stacks: dict[str, StackForward]
    x: PyTree  # [micro-batches, ...], after the last layer
    auxiliary: dict[str, PyTree]  # [layers, micro-batches, ...]


class Head(NamedTuple):
    """The loss, and the cotangents with which the backward pass starts."""

    loss: jax.Array  # the mean
    weight: jax.Array | None  # the total; None for a loss that is a mean
    aux: PyTree  # [micro-batches, ...]: what the loss function returned besides; None unless has_aux
    outer: PyTree  # gradient so far: in the parameters' dtypes if nothing is summed or weighted, otherwise in compute dtypes
    x: PyTree  # [micro-batches, ...]
    auxiliary: dict[str, PyTree]  # [layers, micro-batches, ...]


def forward(model: LayerStack, params: PyTree, batch: PyTree, save_residuals: bool, fence: str) -> Forward:
    """Run the model from the batch up to the loss.

    Args:
        model, params: the model and its parameters.
        batch: with a leading axis of micro-batches.
        save_residuals: save what each layer's backward pass needs instead of computing it a second time.
        fence: see `read_at`.
    """
    x = None
    stacks: dict[str, StackForward] = {}
    auxiliary: dict[str, PyTree] = {}
    for name, layers in by_name(model, params["layers"]).items():
        stacks[name], x, outputs = _forward_stack(model, name, params["outer"], layers, x, batch, save_residuals, fence)
        if stacks_of(model)[name].auxiliary:
            auxiliary[name] = outputs
    return Forward(stacks, x, auxiliary)


def _forward_stack(
    model: LayerStack,
    name: str,
    outer: PyTree,
    layers: PyTree,
    entering: PyTree,
    batch: PyTree,
    save_residuals: bool,
    fence: str,
) -> tuple[StackForward, PyTree, PyTree]:
    """Run one stack; return what is saved, x, and the auxiliary outputs."""
    stack, count, microbatches = stacks_of(model)[name], number_of_layers(layers), length(batch)

    def enter(_: Any, chunk: PyTree) -> tuple[Any, PyTree]:
        entering, batch = chunk
        x, context = enter_stack(model, name, outer, entering, batch)
        return None, (jax.tree.map(jnp.asarray, (x, context)), layer_inputs(stack, batch, count))

    _, ((x, context), inputs) = scan_microbatches(enter, None, (entering, batch), microbatches)
    inputs = swap_leading_axes(inputs)
    layer_pass = Recomputed(stack)
    if save_residuals:

        def first(layers: PyTree, x: PyTree, context: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree, LayerArguments]:
            return at(layers, 0), at(x, 0), LayerArguments(at(context, 0), at(at(inputs, 0), 0))

        layer_pass = Saved(stack, *jax.eval_shape(first, layers, x, context, inputs))

    def run(x: PyTree, of_layer: PyTree) -> tuple[PyTree, PyTree]:
        index, inputs = of_layer
        layer = read_at(fence, layers, index, count)

        def one_microbatch(_: Any, chunk: PyTree) -> tuple[Any, PyTree]:
            x, *arguments = chunk
            return None, layer_pass.forward(layer, x, LayerArguments(*arguments))

        _, (x, auxiliary, saved) = scan_microbatches(one_microbatch, None, (x, context, inputs), microbatches)
        return x, (auxiliary, saved)

    x, (auxiliary, saved) = lax.scan(run, x, (jnp.arange(count), inputs))
    return StackForward(layer_pass, count, entering, context, inputs, saved), x, auxiliary


def head(
    model: LayerStack,
    outer: PyTree,
    passed: Forward,
    batch: PyTree,
    chunks: int,
    seed: jax.Array | float,
    has_aux: bool,
) -> Head:
    """Return the mean loss, and its derivatives times seed.

    Args:
        model, outer, passed: the model, its outer parameters, and its forward pass.
        batch: with a leading axis of micro-batches, all of them or some.
        chunks: how many micro-batches the mean is over.
        seed: the loss scale, or 1.
        has_aux: the loss function returns (loss, aux).
    """
    loss_fn = scaled_loss(lambda *args: model_loss(model, *args), has_aux)

    def one_microbatch(sums: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        x, auxiliary, chunk_batch = chunk

        def loss_of(outer: PyTree, x: PyTree, auxiliary: PyTree) -> Any:
            return loss_fn(outer, x, chunk_batch, auxiliary)

        value, pullback, loss = jax.vjp(loss_of, outer, x, auxiliary, has_aux=True)
        g, dx, d_auxiliary = pullback(jnp.asarray(seed / chunks, value.dtype))
        total, weight, scale, aux = loss
        if scale is not None:
            g = jax.tree.map(lambda leaf: upcast(leaf) * scale * chunks, g)
        elif length(batch) > 1:
            g = jax.tree.map(upcast, g)
        sums = (total, weight, g) if sums is None else add(sums, (total, weight, g))
        return sums, (dx, d_auxiliary, scale, aux)

    chunk = (passed.x, swap_leading_axes(passed.auxiliary), batch)
    zeros = None
    if length(batch) > 1:
        kinds = jax.eval_shape(lambda chunk: one_microbatch(None, at(chunk, 0))[0], chunk)
        zeros = zeros_of(kinds)
    (total, weight, g), (dx, d_auxiliary, scales, aux) = scan_microbatches(one_microbatch, zeros, chunk, length(batch))
    if weight is None:
        return Head(total / chunks, None, aux, g, dx, swap_leading_axes(d_auxiliary))
    # The total weight is only known now: every micro-batch's cotangents are multiplied by scale*chunks/weight, about 1.
    share = scales * chunks / weight

    def reweighted(leaf: jax.Array) -> jax.Array:
        return (upcast(leaf) * share.reshape(share.shape + (1,) * (leaf.ndim - 1))).astype(leaf.dtype)

    dx, d_auxiliary = jax.tree.map(reweighted, (dx, d_auxiliary))
    return Head(total / weight, weight, aux, jax.tree.map(lambda leaf: leaf / weight, g), dx, swap_leading_axes(d_auxiliary))


def backward(
    model: LayerStack,
    outer: PyTree,
    batch: PyTree,
    passed: Forward,
    start: Head,
    written: dict[str, Arrays],
    read: dict[str, Arrays],
    *,
    update: Update | None = None,
    measure: Measure | None = None,
    sums: PyTree = None,
    fence: str,
    proceed: jax.Array | None = None,
    outer_gradient: bool = True,
    at_once: Collection[str] = (),
) -> tuple[PyTree, dict[str, Arrays], PyTree]:
    """Walk back over all stacks.

    Args:
        model, outer, batch, passed, start: the model, what it was given, and its forward pass.
        written: by name of the stack, the arrays with a layer axis that `update` writes, all of them.
        read: the same for the arrays that stay. An array is in one of both: XLA would copy one that is in both. "params" has to
            be in either.
        update: what is done with the gradient of a layer; None: nothing is written.
        measure: what is added up over the layers' gradients, from `sums` on; None: nothing.
        sums: what `measure` starts from.
        fence: see `fenced`.
        proceed: 0-d boolean: False leaves what is written as it is.
        outer_gradient: compute the gradient of the outer parameters, too; otherwise None is returned for it.
        at_once: names of the stacks whose layers are updated together, when the gradients of all of them exist.

    Returns:
        The gradient of the outer parameters in the dtypes of `Head.outer`, the written arrays, and the sums.
    """
    g, dx = (start.outer if outer_gradient else None), start.x
    new: dict[str, Arrays] = {}
    for index, (name, saved) in reversed(list(enumerate(passed.stacks.items()))):
        back = _backward_at_once if name in at_once else _backward_stack
        cotangents, new[name], sums = back(
            saved, dx, start.auxiliary.get(name), written[name], read[name], update, measure, sums, fence, proceed
        )
        if index or outer_gradient:
            enter = functools.partial(_backward_enter, model, name)
            after = jnp.sum(jax.tree.leaves(cotangents)[0])  # a number, whatever the sharding
            g, dx = added_after(fence, after, enter, g, outer, batch, saved.entering, cotangents)
    return g, new, sums


def _backward_stack(
    saved: StackForward,
    dx: PyTree,
    d_auxiliary: PyTree,
    written: Arrays,
    read: Arrays,
    update: Update | None,
    measure: Measure | None,
    sums: PyTree,
    fence: str,
    proceed: jax.Array | None,
) -> tuple[Cotangents, Arrays, PyTree]:
    """Walk back over one stack, from its last layer to its first."""
    count, microbatches = saved.layers, length(dx)

    def updated(old: Arrays, fixed: Arrays, g: PyTree) -> Arrays:
        return {} if update is None else update(old | fixed, g)

    def body(k: jax.Array, carry: PyTree) -> PyTree:
        written, sums, cotangents = carry
        i = count - 1 - k
        old, fixed = at(written, i), read_at(fence, read, i, count)
        arguments = LayerArguments(saved.context, at(saved.inputs, i))
        layer = (old | fixed)["params"]
        g, cotangents = gradient(
            saved.layer_pass, layer, at(saved.saved, i), arguments, cotangents, at(d_auxiliary, i), microbatches
        )
        if measure is not None:
            sums = measure(sums, g)
        if update is not None:
            new = fenced(fence, updated, old, fixed, g, always=k < count, proceed=proceed)
            written = put(written, new, i)  # all of it is new: a slice written back unchanged would cost whole stacks
        return written, sums, cotangents

    floats, _ = partition(saved.context)
    start = Cotangents(dx, jax.tree.map(jnp.zeros_like, floats))
    written, sums, cotangents = lax.fori_loop(0, count, body, (written, sums, start))
    return cotangents, written, sums


def _backward_at_once(
    saved: StackForward,
    dx: PyTree,
    d_auxiliary: PyTree,
    written: Arrays,
    read: Arrays,
    update: Any,
    measure: Measure | None,
    sums: PyTree,
    fence: str,
    proceed: jax.Array | None,
) -> tuple[Cotangents, Arrays, PyTree]:
    """Walk back over one stack, keep the gradients, and then update all layers together."""
    params = (written | read)["params"]
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf if length(dx) == 1 else upcast(leaf)), params)

    def keep(_: Arrays, g: PyTree) -> Arrays:
        return {"gradient": g}

    cotangents, kept, sums = _backward_stack(
        saved, dx, d_auxiliary, {"gradient": zeros}, {"params": params}, keep, measure, sums, "none", None
    )

    def updated(old: Arrays, fixed: Arrays, g: PyTree) -> Arrays:
        return update(old | fixed, g)

    return cotangents, fenced(fence, jax.vmap(updated), written, read, kept["gradient"], proceed=proceed), sums


def _backward_enter(
    model: LayerStack, name: str, total: PyTree, outer: PyTree, batch: PyTree, entering: PyTree, cotangents: Cotangents
) -> tuple[PyTree, PyTree]:
    """Go back through `enter_stack` of one stack; return (outer gradient, derivative of what the previous stack returned)."""

    def one_microbatch(total: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        entering, batch, cotangents = chunk

        def enter(outer: PyTree, entering: PyTree) -> tuple[PyTree, PyTree]:
            x, context = enter_stack(model, name, outer, entering, batch)
            return jax.tree.map(jnp.asarray, (x, partition(context)[0]))

        if total is None:
            _, pullback = jax.vjp(lambda entering: enter(outer, entering), entering)
            return None, pullback(tuple(cotangents))[0]
        _, pullback = jax.vjp(enter, outer, entering)
        g, dx = pullback(tuple(cotangents))
        return add(total, g), dx

    return scan_microbatches(one_microbatch, total, (entering, batch, cotangents), length(batch))
