"""A training step for unrolled models: loss, gradients and update in one jitted function that donates its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..core.dtypes import compute_dtype
from ..core.errors import InvalidArgument
from ..core.hyperparameters import Range, check_number
from .array_ops import jax_ops
from .buffers import buffers, strong
from .direct import apply_directly, as_transformation
from .state import PyTree

LossFunction = Callable[[PyTree, PyTree], Any]

_LARGEST_SCALE = 2.0**14  # its reciprocal is float16's smallest normal number


class TrainState(NamedTuple):
    """What a training step takes and gives back."""

    params: PyTree  # the parameters
    opt_state: PyTree  # of the Optax transform


def init_train_state(tx: optax.GradientTransformation, params: PyTree) -> TrainState:
    """The state before the first step. Every array in it is its own: params stay usable when the state is donated.

    Args:
        tx: any Optax transform.
        params: copied.
    """
    copied = jax.tree.map(lambda leaf: strong(jnp.copy(leaf)), params)
    taken: set[Any] = set()

    def own(leaf: Any) -> Any:
        # Some transforms start from the parameters themselves (averages of them); a buffer can be donated only once.
        held = buffers(leaf)
        shared = not taken.isdisjoint(held)
        taken.update(held)
        return jnp.copy(leaf) if shared else leaf

    return jax.tree.map(own, TrainState(copied, as_transformation(tx).init(copied)))


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
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidArgument(f"microbatches={microbatches!r} is not possible; it must be an integer in [1, inf).")
    if max_norm is not None:
        check_number("max_norm", max_norm, Range(0.0, low_included=False))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, weight, grads = _mean_gradient(loss_fn, state.params, batch, microbatches)
        norm = _global_norm(grads)
        if max_norm is not None:
            # One division after the other: max_norm/norm may be below the smallest number.
            divisor, factor = jnp.where(norm <= max_norm, 1.0, norm), jnp.where(norm <= max_norm, 1.0, max_norm)
            grads = jax.tree.map(lambda g: (_widened(g) / divisor * factor).astype(g.dtype), grads)
        new = TrainState(*apply_directly(tx, grads, state.opt_state, state.params))
        skipped = jnp.asarray(False)
        if weight is not None:
            skipped = ~(weight > 0)  # true of NaN
            new = jax.tree.map(lambda old, updated: jnp.where(skipped, old, updated), state, new)
        return new, {"loss": loss, "grad_norm": norm, "skipped": skipped}

    return jax.jit(step, donate_argnums=0)


def _widened(x: jax.Array) -> jax.Array:
    return jax_ops.cast(x, compute_dtype(jax_ops.dtype_name(x)))


def _global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of all gradients together, in the compute dtype.

    Each gradient is read by itself, once, and released: no largest element is waited for. The squares are summed twice, as
    they are and scaled down; the second sum counts where the first overflows.
    """
    leaves = [_widened(g) for g in jax.tree.leaves(grads)]
    dtype = jnp.result_type(*leaves, jnp.float32)
    scale = 2.0 ** (jnp.finfo(dtype).maxexp // 2 + 20)
    zero = jnp.zeros((), dtype)

    def add(these: Any, those: Any) -> Any:
        return these[0] + those[0], these[1] + those[1]

    sums = (zero, zero)
    for leaf in leaves:
        wide = leaf.astype(dtype)
        # Small elements do not count there; without this choice XLA would square first, and overflow.
        lowered = jnp.where(jnp.abs(wide) <= 1, 0.0, wide / scale)
        squares = (jnp.square(wide), jnp.square(lowered))
        sums = add(sums, lax.reduce(squares, (zero, zero), add, tuple(range(wide.ndim))))  # two sums in one pass
    plain, scaled = sums
    fits = plain < jnp.inf  # false of NaN
    return jnp.sqrt(jnp.where(fits, plain, scaled)) * jnp.where(fits, 1.0, scale)


def _checked(loss_fn: LossFunction) -> Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array | None]]:
    """loss_fn as a function to (sum, weight), weight None for a mean; both in the compute dtype."""

    def checked(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array | None]:
        returned = loss_fn(params, batch)
        parts = returned if isinstance(returned, tuple) else (returned,)
        scalars = all(hasattr(part, "dtype") or isinstance(part, float | int) for part in parts)
        if len(parts) not in (1, 2) or not scalars or any(jnp.shape(part) != () for part in parts):
            shapes = jax.tree.map(jnp.shape, returned)
            raise InvalidArgument(
                f"loss_fn returned something of shape {shapes}; it must return a scalar, the mean loss, or a tuple "
                "(sum, weight) of two scalars."
            )
        if not jnp.issubdtype(jnp.asarray(parts[0]).dtype, jnp.floating):
            raise InvalidArgument(
                f"loss_fn returned a loss of dtype {jnp.asarray(parts[0]).dtype}; it must be a floating-point scalar."
            )
        total = _widened(jnp.asarray(parts[0]))
        return total, jax_ops.cast(parts[1], total.dtype.name) if len(parts) == 2 else None

    return checked


def _chunks(batch: PyTree, microbatches: int) -> PyTree:
    """The batch with (microbatches, rest) in the place of its leading axis."""

    def cut(path: Any, leaf: jax.Array) -> jax.Array:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % microbatches:
            raise InvalidArgument(
                f"microbatches={microbatches} does not divide the leading axis of batch{jax.tree_util.keystr(path)}, "
                f"which has shape {shape}."
            )
        # Every microbatches-th row into one chunk: rows sharded over devices stay where they are.
        return jnp.swapaxes(jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(cut, batch)


def _scaled(loss_fn: LossFunction) -> Callable[[PyTree, PyTree], tuple[jax.Array, tuple[jax.Array, Any, Any]]]:
    """loss_fn as a function to sum/scale, and (sum, weight, scale); weight and scale None for a mean.

    The gradient of a sum over many tokens leaves the range of float16 where the mean's does not. The scale is the power
    of two next to the weight, at most one that float16 can divide by; dividing by it changes no digit.
    """
    checked = _checked(loss_fn)

    def scaled(params: PyTree, batch: PyTree) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
        total, weight = checked(params, batch)
        if weight is None:
            return total, (total, None, None)
        near = jnp.clip(lax.stop_gradient(weight), 1.0, _LARGEST_SCALE)
        scale = lax.reduce_precision(near, exponent_bits=8, mantissa_bits=0)
        return total / scale, (total, weight, scale)

    return scaled


def _mean_gradient(
    loss_fn: LossFunction, params: PyTree, batch: PyTree, microbatches: int
) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """The mean loss over the whole batch, the total weight (None for a loss that is a mean), the mean's gradient."""
    value_and_grad = jax.value_and_grad(_scaled(loss_fn), has_aux=True)
    if microbatches == 1:
        (_, (loss, weight, scale)), grads = value_and_grad(params, batch)
        if weight is None:
            return loss, None, grads
        return loss / weight, weight, _divided(grads, weight / scale, params)

    def of_chunk(chunk: PyTree) -> PyTree:
        (_, (loss, weight, scale)), grads = value_and_grad(params, chunk)
        grads = jax.tree.map(lambda g: _widened(g) if scale is None else _widened(g) * scale, grads)
        return (loss, weight), grads

    def accumulate(sums: PyTree, chunk: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, of_chunk(chunk)), None

    chunks = _chunks(batch, microbatches)
    kinds = jax.eval_shape(of_chunk, jax.tree.map(lambda leaf: leaf[0], chunks))
    zeros = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
    ((loss, weight), grads), _ = lax.scan(accumulate, zeros, chunks)
    denominator = microbatches if weight is None else weight
    return loss / denominator, weight, _divided(grads, denominator, params)


def _divided(grads: PyTree, denominator: jax.Array | int, params: PyTree) -> PyTree:
    """grads / denominator, rounded to the parameters' dtypes once."""
    return jax.tree.map(lambda g, p: (_widened(g) / denominator).astype(p.dtype), grads, params)
