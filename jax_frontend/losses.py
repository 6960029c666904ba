"""The mean of a loss over a batch that is cut into chunks, whether the loss is a mean itself or a sum and its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import InvalidArgumentError
from .array_ops import jax_ops, widened
from .state import PyTree

_LARGEST_SCALE = 2.0**14  # its reciprocal is float16's smallest normal number


class Loss(NamedTuple):
    """What a loss function said of one chunk, in the compute dtype.

    total: the sum, or the mean where there is no weight. weight: None for a mean. scale: a power of two next to the
    weight, at most one that float16 can divide by, or None: the gradient of a sum over many tokens leaves the range of
    float16 where that of total/scale does not, and dividing by it changes no digit.
    """

    total: jax.Array
    weight: jax.Array | None
    scale: jax.Array | None


def scaled_loss(loss_fn: Callable[..., Any]) -> Callable[..., tuple[jax.Array, Loss]]:
    """loss_fn as a function to (total/scale, `Loss`): the first is what to differentiate.

    Args:
        loss_fn: returns the mean loss, a floating-point scalar, or (sum, weight), two scalars.

    Raises:
        InvalidArgumentError: when called, if it returned something else.
    """

    def scaled(*args: Any) -> tuple[jax.Array, Loss]:
        total, weight = _checked(loss_fn(*args))
        if weight is None:
            return total, Loss(total, None, None)
        near = jnp.clip(lax.stop_gradient(weight), 1.0, _LARGEST_SCALE)
        scale = lax.reduce_precision(near, exponent_bits=8, mantissa_bits=0)
        return total / scale, Loss(total, weight, scale)

    return scaled


def _checked(returned: Any) -> tuple[jax.Array, jax.Array | None]:
    parts = returned if isinstance(returned, tuple) else (returned,)
    scalars = all(hasattr(part, "dtype") or isinstance(part, float | int) for part in parts)
    if len(parts) not in (1, 2) or not scalars or any(jnp.shape(part) != () for part in parts):
        shapes = jax.tree.map(jnp.shape, returned)
        raise InvalidArgumentError(
            f"the loss function returned something of shape {shapes}; it must return a scalar, the mean loss, or a tuple "
            "(sum, weight) of two scalars."
        )
    if not jnp.issubdtype(jnp.asarray(parts[0]).dtype, jnp.floating):
        raise InvalidArgumentError(
            f"the loss function returned a loss of dtype {jnp.asarray(parts[0]).dtype}; it must be a floating-point scalar."
        )
    total = widened(jnp.asarray(parts[0]))
    return total, jax_ops.cast(parts[1], total.dtype.name) if len(parts) == 2 else None


def check_microbatches(microbatches: Any) -> None:
    """Raise `InvalidArgumentError` unless it is a number of chunks."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidArgumentError(f"microbatches={microbatches!r} is not possible; it must be an integer in [1, inf).")


def chunks(batch: PyTree, microbatches: int) -> PyTree:
    """The batch with (microbatches, rest) in the place of its leading axis. A single typed PRNG key is split.

    Raises:
        InvalidArgumentError: a leaf cannot be cut evenly, or has neither as many rows as the others nor one for each
            micro-batch, or there is none.
    """
    if not jax.tree.leaves(batch):
        raise InvalidArgumentError("batch has no arrays; give the model at least one.")

    rows: dict[int, Any] = {}  # and where there are so many

    def cut(path: Any, leaf: jax.Array) -> jax.Array:
        shape = jnp.shape(leaf)
        if microbatches == 1:
            return jnp.asarray(leaf)[None]
        if not shape and jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf, microbatches)
        if not shape or shape[0] % microbatches:
            raise InvalidArgumentError(
                f"microbatches={microbatches} does not divide the leading axis of batch{jax.tree_util.keystr(path)}, "
                f"which has shape {shape}; give every array of the batch a leading axis of rows, a multiple of microbatches "
                "(what is the same for all rows goes into the loss function by closure, or repeated for each row)."
            )
        if shape[0] != microbatches:  # which is a row for each micro-batch, beside arrays of any length
            rows.setdefault(shape[0], path)
        if len(rows) > 1:
            (first, there), (second, here) = rows.items()
            raise InvalidArgumentError(
                f"batch{jax.tree_util.keystr(there)} has {first} rows and batch{jax.tree_util.keystr(here)} {second}: cut into "
                f"microbatches={microbatches}, they would no longer belong together. Give all arrays as many rows, "
                "or one row for each micro-batch."
            )
        # Every microbatches-th row into one chunk: rows sharded over devices stay where they are.
        return jnp.swapaxes(jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(cut, batch)


def divided(grads: PyTree, denominator: jax.Array | float, params: PyTree) -> PyTree:
    """grads / denominator, rounded to the parameters' dtypes once."""
    return jax.tree.map(lambda g, p: (widened(g) / denominator).astype(p.dtype), grads, params)
