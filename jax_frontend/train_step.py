"""A training step for unrolled models: loss, gradients and update in one jitted function that donates its state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..core.errors import InvalidArgumentError, PenstockError
from .array_ops import upcast, zeros_of
from .direct import apply_directly, as_transformation
from .donation import DonatingFunction
from .functions import check_takes
from .losses import divided, scaled_loss, with_aux
from .microbatches import check_microbatches, chunks
from .norms import check_max_norm, clipped, global_norm
from .separability import error_line
from .sharding import sharded_like
from .state import PyTree
from .train_state import TrainState, check_unstacked

LossFunction = Callable[[PyTree, PyTree], Any]


def make_train_step(
    loss_fn: LossFunction,
    tx: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    max_norm: float | None = None,
    clip_passes: int | None = None,
    has_aux: bool = False,
    whole: Collection[str] = (),
) -> DonatingFunction:
    r"""Return a jitted training step (state, batch) -> (state, metrics) that donates its state.

        g = mean over the micro-batches of the gradients       g <- g * min(1, max_norm/||g||)       update with tx

    For models whose layers are unrolled: XLA then interleaves backward pass and update, and only a few gradients are
    alive at any time, with max_norm too. With micro-batches the sum of all gradients is alive. Both are exact.

    Args:
        loss_fn: (params, batch) -> the mean loss, a floating-point scalar; or -> `WeightedMean(sum, weight)`, whose mean is
            over the *whole* batch.
        tx: any Optax transform; it is given value=, the loss, if it takes that (optax.contrib.reduce_on_plateau).
        microbatches: number of equal chunks into which the leading axis of every leaf of the batch is split: n chunks of
            every n-th row, so that rows sharded over devices stay there. A single typed PRNG key is split. They run one after
            the other; their gradients are averaged in float32 (float64 for float64 parameters).
        max_norm: largest global norm of the gradient, in (0, inf); None: no clipping. The norm of finite gradients is
            finite wherever float32 can hold it. What is not finite propagates: a NaN makes all gradients NaN, an
            infinity becomes NaN and the others 0.
        clip_passes: number of backward passes for max_norm. 2: once for the norm, its gradients dropped one by one,
            and once more for the update, on the activations of the one forward pass: up to two thirds more arithmetic.
            1: once, and all gradients wait for their norm: as many bytes more as the parameters have. None: 2, but 1 with
            micro-batches, whose gradients wait for each other anyway.
        has_aux: loss_fn returns (loss, aux), as for jax.grad, and the metrics have "aux": any tree of arrays, which is not
            differentiated; with micro-batches those of each, with a leading axis of micro-batches.
        whole: names in the batch ("positions", or "context.mask") of what every micro-batch is given as it is, not split.

    Returns:
        A jitted function, with .lower and .trace. metrics are 0-d arrays: "loss", before the update; "grad_norm", the global
        norm before clipping; "skipped", a boolean: True when loss_fn gave a WeightedMean with a total weight that is not
        positive (0, NaN), so that there was no mean to descend; state is then unchanged. An update that a wrapper inside
        tx drops (optax.apply_if_finite) is counted in that wrapper's state, not here.

    Raises:
        InvalidArgumentError: loss_fn is not callable or takes other arguments, tx is not a transform; microbatches, max_norm
            or clip_passes out of range; when traced, a loss that is not a scalar, a batch that cannot be split evenly, a state
            that is not a TrainState, or is of stacked layers or of another transform; at a step, an array that was deleted, or
            is to be donated twice.
        UnsupportedTensorError: when traced, parameters that are not floating-point.
        RefusedError: when traced, if a transform after a compensated one changes its updates.

    Example:
        step = make_train_step(loss_fn, tx, microbatches=4, max_norm=1.0)
        state, metrics = step(init_train_state(tx, params), batch)
    """
    check_takes("loss_fn", loss_fn, "params, batch")
    as_transformation(tx)  # raises
    check_microbatches(microbatches, whole)
    check_max_norm(max_norm)
    twice = _clips_twice(clip_passes, microbatches) and max_norm is not None

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        check_unstacked(tx, state)
        if microbatches > 1:
            parts = chunks(batch, microbatches, whole)
            loss, weight, aux, grads = _mean_gradient(scaled_loss(loss_fn, has_aux), state.params, parts, microbatches)
            norm = global_norm(grads)
        else:
            loss, weight, aux, backward = _backward(scaled_loss(loss_fn, has_aux), state.params, batch)
            grads = backward(1.0)
            norm = global_norm(grads)
            if twice:
                # XLA would merge equal passes, through a barrier too. This one starts from a number that only the first one
                # gives, at its end: 1, or the norm where that is NaN.
                grads = backward(jnp.where(norm >= 0, 1.0, norm))
        grads = clipped(grads, norm, max_norm)
        new = _updated(tx, grads, state, loss)
        skipped = jnp.asarray(False)
        if weight is not None:
            skipped = ~(weight > 0)  # true of NaN
            new = jax.tree.map(lambda old, updated: jnp.where(skipped, old, updated), state, new)
        return sharded_like(new, state), with_aux({"loss": loss, "grad_norm": norm, "skipped": skipped}, has_aux, aux)

    return DonatingFunction(step, "state")


def _updated(tx: optax.GradientTransformation, grads: PyTree, state: TrainState, loss: jax.Array) -> TrainState:
    try:
        # XLA interleaves backward pass and update: no update may wait for a gradient that is not its own.
        return TrainState(*apply_directly(tx, grads, state.opt_state, state.params, offered={"value": loss}, in_turn=False))
    except PenstockError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "tx.update fails when it is given the gradients of all parameters, the state, the parameters and value, the loss "
            f"({error_line(error)}). What needs more (optax.lbfgs), or other gradients (optax.lookahead), gets them from "
            "make_update: update(grads, state, params, **extra_args)."
        ) from error


def _clips_twice(clip_passes: Any, microbatches: int) -> bool:
    if clip_passes is None:
        return microbatches == 1
    if isinstance(clip_passes, bool) or clip_passes not in (1, 2):
        raise InvalidArgumentError(f"clip_passes={clip_passes!r} is not possible; it must be 1 or 2.")
    if clip_passes == 2 and microbatches > 1:
        raise InvalidArgumentError(
            f"clip_passes=2 with microbatches={microbatches} would save nothing: the gradients of the micro-batches are summed "
            "before the norm is known. Leave clip_passes out, or use make_release_step, which sums layer by layer."
        )
    return clip_passes == 2


def _backward(
    loss_fn: LossFunction, params: PyTree, batch: PyTree
) -> tuple[jax.Array, jax.Array | None, PyTree, Callable[[Any], PyTree]]:
    """Return the loss, the weight (None for a mean), aux, and a function from a factor to the gradient times it.

    Args:
        loss_fn: of `scaled_loss`.
        params, batch: its arguments.
    """
    scaled, pull_back, loss = jax.vjp(lambda p: loss_fn(p, batch), params, has_aux=True)

    def backward(seed: Any) -> PyTree:
        (grads,) = pull_back(jnp.asarray(seed, scaled.dtype))
        return grads if loss.weight is None or loss.scale is None else divided(grads, loss.weight / loss.scale, params)

    return loss.total if loss.weight is None else loss.total / loss.weight, loss.weight, loss.aux, backward


def _mean_gradient(
    loss_fn: LossFunction, params: PyTree, parts: PyTree, microbatches: int
) -> tuple[jax.Array, jax.Array | None, PyTree, PyTree]:
    """Return the mean loss over the whole batch, the total weight (None for a mean), aux, and the gradient of the mean.

    Args:
        loss_fn: of `scaled_loss`.
        params: the parameters.
        parts: of `chunks`.
        microbatches: their number.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def of_chunk(chunk: PyTree) -> tuple[PyTree, PyTree]:
        (_, loss), grads = value_and_grad(params, chunk)
        grads = jax.tree.map(lambda g: upcast(g) if loss.scale is None else upcast(g) * loss.scale, grads)
        return (loss.total, loss.weight, grads), loss.aux

    def accumulate(sums: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
        values, aux = of_chunk(chunk)
        return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, values), aux

    kinds, _ = jax.eval_shape(of_chunk, jax.tree.map(lambda leaf: leaf[0], parts))
    (total, weight, grads), aux = lax.scan(accumulate, zeros_of(kinds), parts)
    denominator = microbatches if weight is None else weight
    return total / denominator, weight, aux, divided(grads, denominator, params)
