"""The mean of a loss over a batch that is split into chunks; the loss is a mean itself, or a sum and its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import InvalidArgumentError
from .array_ops import jax_ops, upcast
from .state import PyTree

_LARGEST_SCALE = 2.0**14  # its reciprocal is float16's smallest normal number


class Loss(NamedTuple):
    """What a loss function returned for one chunk, in the compute dtype.

    The gradient of a sum over many tokens may leave the range of float16; that of total/scale does not, and dividing by a
    power of two changes no digit.
    """

    total: jax.Array  # the sum; the mean where there is no weight
    weight: jax.Array | None  # None for a mean
    scale: jax.Array | None  # power of two near the weight, at most 2^14; None for a mean


def scaled_loss(loss_fn: Callable[..., Any]) -> Callable[..., tuple[jax.Array, Loss]]:
    """Return loss_fn as a function to (total/scale, `Loss`); the first is to be differentiated.

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
    total = upcast(jnp.asarray(parts[0]))
    return total, jax_ops.cast(parts[1], total.dtype.name) if len(parts) == 2 else None


def check_microbatches(microbatches: Any) -> None:
    """Raise `InvalidArgumentError` unless `microbatches` is a positive integer."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidArgumentError(f"microbatches={microbatches!r} is not possible; it must be an integer in [1, inf).")


def chunks(batch: PyTree, microbatches: int) -> PyTree:
    """Return the batch with two axes (microbatches, rest) for its leading one. A single typed PRNG key is split.

    Raises:
        InvalidArgumentError: a leaf that cannot be split evenly, or has neither as many rows as the others nor one for each
            micro-batch; a batch without arrays.
    """
    if not jax.tree.leaves(batch):
        raise InvalidArgumentError("batch has no arrays; give the model at least one.")

    rows: dict[int, Any] = {}  # the path of a leaf by its number of rows

    def split(path: Any, leaf: jax.Array) -> jax.Array:
        shape = jnp.shape(leaf)
        if microbatches == 1:
            return jnp.asarray(leaf)[None]
        if not shape and jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf, microbatches)
        if not shape or shape[0] % microbatches:
            raise InvalidArgumentError(
                f"microbatches={microbatches} does not divide the leading axis of batch{jax.tree_util.keystr(path)}, "
                f"which has shape {shape}; give every array of the batch a leading axis of rows, a multiple of microbatches "
                "(give what is the same for all rows to the loss function by closure, or repeat it for each row)."
            )
        if shape[0] != microbatches:  # an array with one row for each micro-batch goes with arrays of any length
            rows.setdefault(shape[0], path)
        if len(rows) > 1:
            (first, one), (second, other) = rows.items()
            raise InvalidArgumentError(
                f"batch{jax.tree_util.keystr(one)} has {first} rows and batch{jax.tree_util.keystr(other)} {second}; split "
                f"into microbatches={microbatches}, they would no longer belong together. Give all arrays as many rows, "
                "or one row for each micro-batch."
            )
        # A chunk is every microbatches-th row, so that rows sharded over devices stay there.
        return jnp.swapaxes(jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split, batch)


def divided(grads: PyTree, denominator: jax.Array | float, params: PyTree) -> PyTree:
    """Return grads / denominator, rounded once to the parameters' dtypes."""
    return jax.tree.map(lambda g, p: (upcast(g) / denominator).astype(p.dtype), grads, params)
