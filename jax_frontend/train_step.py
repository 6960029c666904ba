"""A training step for unrolled models: loss, gradients and update in one jitted function that donates its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..core.hyperparameters import Range, check_number
from .array_ops import widened
from .direct import apply_directly
from .losses import check_microbatches, chunks, divided, scaled_loss
from .norms import clipped, global_norm
from .state import PyTree
from .train_state import TrainState

LossFunction = Callable[[PyTree, PyTree], Any]


def make_train_step(
    loss_fn: LossFunction,
    tx: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    max_norm: float | None = None,
) -> jax.stages.Wrapped:
    r"""A jitted training step (state, batch) -> (state, metrics) that donates its state.

        g = mean over the micro-batches of the gradients       g <- g * min(1, max_norm/||g||)       update with tx

    For models whose layers are unrolled: XLA then interleaves backward pass and update, and only a few gradients are
    alive at any time. micro-batches and max_norm are exact; each of them needs all gradients at once.

    Args:
        loss_fn: (params, batch) -> the mean loss, a floating-point scalar; or -> (sum, weight), two scalars: the loss
            is then sum/weight over the *whole* batch, however the weight (the number of tokens) is spread over the
            micro-batches.
        tx: any Optax transform.
        microbatches: into how many equal chunks the leading axis of every leaf of the batch is cut. They run one after
            the other; their gradients are averaged in float32 (float64 for float64 parameters).
        max_norm: largest global norm of the gradient, in (0, inf); None: no clipping. The norm of finite gradients is
            finite wherever float32 can hold it. What is not finite propagates: a NaN makes all gradients NaN, an
            infinity becomes NaN and the others 0.

    Returns:
        A jitted function (it has .lower). metrics are 0-d arrays: "loss", before the update; "grad_norm", the global
        norm before clipping; "skipped", a boolean: True when loss_fn gave (sum, weight) with a total weight that is not
        positive (0, NaN), so that there was no mean to descend; state is then unchanged. An update that a wrapper inside
        tx drops (optax.apply_if_finite) is told by that wrapper's state, not here.

    Raises:
        InvalidArgument: microbatches or max_norm out of range; when traced, a loss that is not a scalar, or a batch that
            cannot be cut evenly.
        Refused: when traced, if a transform after a compensated one changes its updates.
    """
    check_microbatches(microbatches)
    if max_norm is not None:
        check_number("max_norm", max_norm, Range(0.0, low_included=False))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, weight, grads = _mean_gradient(loss_fn, state.params, batch, microbatches)
        norm = global_norm(grads)
        grads = clipped(grads, norm, max_norm)
        new = TrainState(*apply_directly(tx, grads, state.opt_state, state.params))
        skipped = jnp.asarray(False)
        if weight is not None:
            skipped = ~(weight > 0)  # true of NaN
            new = jax.tree.map(lambda old, updated: jnp.where(skipped, old, updated), state, new)
        return new, {"loss": loss, "grad_norm": norm, "skipped": skipped}

    return jax.jit(step, donate_argnums=0)


def _mean_gradient(
    loss_fn: LossFunction, params: PyTree, batch: PyTree, microbatches: int
) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """The mean loss over the whole batch, the total weight (None for a loss that is a mean), the mean's gradient."""
    value_and_grad = jax.value_and_grad(scaled_loss(loss_fn), has_aux=True)
    if microbatches == 1:
        (_, loss), grads = value_and_grad(params, batch)
        if loss.weight is None:
            return loss.total, None, grads
        return loss.total / loss.weight, loss.weight, divided(grads, loss.weight / loss.scale, params)

    def of_chunk(chunk: PyTree) -> PyTree:
        (_, loss), grads = value_and_grad(params, chunk)
        grads = jax.tree.map(lambda g: widened(g) if loss.scale is None else widened(g) * loss.scale, grads)
        return (loss.total, loss.weight), grads

    def accumulate(sums: PyTree, chunk: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, of_chunk(chunk)), None

    parts = chunks(batch, microbatches)
    kinds = jax.eval_shape(of_chunk, jax.tree.map(lambda leaf: leaf[0], parts))
    zeros = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
    ((total, weight), grads), _ = lax.scan(accumulate, zeros, parts)
    denominator = microbatches if weight is None else weight
    return total / denominator, weight, divided(grads, denominator, params)
