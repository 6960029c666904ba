"""The mean of a loss over a batch that is split into micro-batches; the loss is a mean itself, or a sum and its weight."""

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


class WeightedMean(NamedTuple):
    """The loss of a micro-batch as a sum and its weight: the loss is then sum/weight over the *whole* batch.

    So a mean over tokens is the mean over all of them, however they are spread over the micro-batches. The weight is a
    constant: it is not differentiated.

    Example:
        return WeightedMean(jnp.sum(losses * mask), jnp.sum(mask))
    """

    sum: Any  # 0-d, floating-point
    weight: Any  # 0-d; the number of tokens


class Loss(NamedTuple):
    """What a loss function returned for one micro-batch, in the compute dtype.

    The gradient of a sum over many tokens may leave the range of float16; that of total/scale does not, and dividing by a
    power of two changes no digit.
    """

    total: jax.Array  # the sum; the mean where there is no weight
    weight: jax.Array | None  # None for a mean
    scale: jax.Array | None  # power of two near the weight, at most 2^14; None for a mean
    aux: PyTree  # what has_aux=True lets it return besides; otherwise None


def scaled_loss(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[jax.Array, Loss]]:
    """Return loss_fn as a function to (total/scale, `Loss`); the first is to be differentiated.

    Args:
        loss_fn: returns the mean loss, a floating-point scalar, or a `WeightedMean`.
        has_aux: it returns a tuple (loss, aux) of that and any tree.

    Raises:
        InvalidArgumentError: when called, if it returned something else.
    """

    def scaled(*args: Any) -> tuple[jax.Array, Loss]:
        total, weight, aux = _checked(loss_fn(*args), has_aux)
        if weight is None:
            return total, Loss(total, None, None, aux)
        near = jnp.clip(lax.stop_gradient(weight), 1.0, _LARGEST_SCALE)
        scale = lax.reduce_precision(near, exponent_bits=8, mantissa_bits=0)
        return total / scale, Loss(total, weight, scale, aux)

    return scaled


def _checked(returned: Any, has_aux: bool) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Return (total, weight, aux) of what a loss function returned."""
    aux = None
    if has_aux:
        if type(returned) is not tuple or len(returned) != 2:
            raise InvalidArgumentError(
                f"with has_aux=True the loss function must return a tuple (loss, aux), and returned {_described(returned)}."
            )
        returned, aux = returned
    elif type(returned) is tuple:
        raise InvalidArgumentError(
            f"the loss function returned {_described(returned)}, whose meaning is not known. For (loss, aux) give "
            "has_aux=True, and find aux in the metrics; for a sum and its weight return WeightedMean(sum, weight)."
        )
    parts = returned if isinstance(returned, WeightedMean) else (returned,)
    scalars = all(hasattr(part, "dtype") or isinstance(part, float | int) for part in parts)
    if not scalars or any(jnp.shape(part) != () for part in parts):
        raise InvalidArgumentError(
            f"the loss function returned {_described(returned)} as the loss; it must return a scalar, the mean "
            "loss, or a WeightedMean of two scalars."
        )
    if not jnp.issubdtype(jnp.asarray(parts[0]).dtype, jnp.floating):
        raise InvalidArgumentError(
            f"the loss function returned a loss of dtype {jnp.asarray(parts[0]).dtype}; it must be a floating-point scalar."
        )
    total = upcast(jnp.asarray(parts[0]))
    return total, jax_ops.cast(parts[1], total.dtype.name) if len(parts) == 2 else None, aux


def _described(returned: Any) -> str:
    return f"something of shape {jax.tree.map(jnp.shape, returned)}"


def with_aux(metrics: dict[str, Any], has_aux: bool, aux: PyTree) -> dict[str, Any]:
    """Return the metrics of a step with what the loss function returned besides the loss, where it did."""
    return {**metrics, "aux": aux} if has_aux else metrics


def divided(grads: PyTree, denominator: jax.Array | float, params: PyTree) -> PyTree:
    """Return grads / denominator, rounded once to the parameters' dtypes."""
    return jax.tree.map(lambda g, p: (upcast(g) / denominator).astype(p.dtype), grads, params)
