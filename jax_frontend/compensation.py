r"""Compensation through Optax: an increment in the parameter's dtype, and the bits that adding it will lose.

The exact new value is x, a number of the compute dtype; the stored parameter becomes p'. `core.compensation` defines how
p' and k hold x. An Optax transform cannot return p', only an increment u that its caller adds, so here

    u = cast(p' - p)        q = cast(p + u)        k = x - q

where q is what optax.apply_updates will produce. While p/2 <= p' <= 2p, p' - p is exact and q = p'. Beyond, q may differ from
p' by about a spacing, and k saturates: kahan rounds, split ends half a bfloat16 spacing from q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from ..core import compensation as compensations
from ..core.array_ops import Array
from ..core.compensation import Stored
from ..core.errors import InvalidArgumentError
from .array_ops import jax_ops
from .direct import as_transformation
from .records import Record, recorder
from .state import CompensatedState, PyTree, Stochastic, compensated_leaves, initial_tree

_MAGNITUDE = 0x7FFFFFFF  # a float32's bits without its sign
_REMAINDERS = {"split": ("int16", 1), "split8": ("int8", 1 << 8)}
"""The dtype of k, and its unit in bits of a float32."""


class Stepped(NamedTuple):
    """One parameter after an update."""

    increment: Array  # in the parameter's dtype
    parameter: Array  # the exact new one, in its dtype
    compensation: Array | None  # of the exact parameter if direct, of what adding the increment gives otherwise


def residual(compensation: str, exact: Array, reached: Array) -> Array:
    """Return k for a parameter that is `reached` and should be `exact`, or the nearest that k can hold.

    Args:
        compensation: "kahan", "split" or "split8".
        exact: float32; for split8 one of those that it can hold.
        reached: float32, a number of the parameter's dtype.

    Returns:
        float32 for kahan (to be cast), int16 for split, int8 for split8.
    """
    ops, xp = jax_ops, jax_ops.xp
    if compensation == "kahan":
        return xp.where(xp.isfinite(reached), exact - reached, 0.0)
    exact_bits, reached_bits = ops.bitcast(exact, "int32"), ops.bitcast(reached, "int32")
    # Differences of bits are distances within one sign only; from the other side of zero, zero is the nearest.
    same_sign = (exact_bits ^ reached_bits) >= 0
    magnitude = xp.where(same_sign, exact_bits & _MAGNITUDE, 0)
    dtype, unit = _REMAINDERS[compensation]
    limits = xp.iinfo(dtype)
    kept = xp.clip((magnitude - (reached_bits & _MAGNITUDE)) // unit, limits.min, limits.max)
    return ops.cast(xp.where(xp.isnan(reached), 0, kept), dtype)


def step(
    compensation: str, parameter: Array, value: Array, added: Array, *, direct: bool, bits: Array | None = None
) -> Stepped:
    """Add `added` to a parameter.

    Args:
        compensation: resolved: one of `core.compensation.COMPENSATIONS` but "auto".
        parameter: as it is stored.
        value: of the parameter and its compensation together, in the compute dtype.
        added: what the update adds to the value, in the compute dtype.
        direct: the caller takes the exact new parameter; otherwise it adds the increment.
        bits: for "stochastic" and "split8".
    """
    ops, xp = jax_ops, jax_ops.xp
    dtype = ops.dtype_name(parameter)
    exact = value + added
    stored = compensations.store(ops, compensation, exact, dtype, bits)
    if compensation == "none":
        return Stepped(ops.cast(added, dtype), stored.parameter, None)
    old, new = ops.cast(parameter, "float32"), ops.cast(stored.parameter, "float32")
    increment = ops.round_to(xp.where(new == old, 0.0, new - old), dtype)  # an infinity stays one
    kept = stored.compensation
    if not direct and kept is not None:
        reached = ops.round_to(old + increment, dtype)
        if compensation == "split8":
            exact = compensations.load(ops, compensation, stored)  # as it was rounded
        kept = ops.cast(residual(compensation, exact, reached), ops.dtype_name(kept))
    return Stepped(ops.cast(increment, dtype), stored.parameter, kept)


def compensated(tx: optax.GradientTransformation, compensation: str = "auto") -> optax.GradientTransformationExtraArgs:
    r"""Return `tx` with the bits kept that low-precision parameters lose when its updates are added to them.

        x = p + k + u        p <- cast(x)        k <- x - p

    float32 and float64 parameters are left alone. The updates stay in the parameters' dtype. With `optax.apply_updates`
    the result is exact while p/2 <= p' <= 2p and saturates beyond; in `make_update` and `make_train_step` it always is.

    It must be the last transform in a chain: whatever changes the updates afterwards makes the kept bits wrong, and so do
    wrappers such as `optax.lookahead` and `optax.contrib.schedule_free`; under them use compensation="none". `make_update`
    and `make_train_step` refuse both; with `optax.apply_updates` alone it cannot be noticed.

    Args:
        tx: any Optax transform whose updates are added to parameters. It sees the parameters, not the kept bits.
        compensation: "auto" (split for bfloat16, kahan for float16), "kahan" (k in the parameter's dtype), "split"
            (bfloat16 only: an int16 k makes up the float32 value) or "none".

    Returns:
        A transform with a `CompensatedState`; its update needs params.

    Raises:
        InvalidArgumentError: an unknown compensation; at init, split for float16, or a tx that compensates already.

    Example:
        tx = optax.chain(optax.clip_by_global_norm(1.0), compensated(optax.adamw(1e-3)))

    References:
        Kahan, Further remarks on reducing truncation errors, 1965; Zamirai et al., https://arxiv.org/abs/2010.06192.
    """
    if compensations.resolve(compensation, "bfloat16") in compensations.WITH_RANDOM_BITS:
        raise InvalidArgumentError(
            f"compensated(tx, {compensation!r}) is not possible, as it does not count updates, of which each has other random "
            f"bits; use 'split' or 'kahan', or compensation={compensation!r} of penstock's own transforms."
        )
    inner = as_transformation(tx)

    def init(params: PyTree) -> CompensatedState:
        state = inner.init(params)
        if compensated_leaves(state):
            raise InvalidArgumentError(
                "compensated(tx): tx compensates its updates itself already; leave compensated() out, or build tx with "
                "compensation='none'."
            )
        kept = [initial_leaf(compensation, leaf) for leaf in jax.tree.leaves(params)]
        return CompensatedState(state, initial_tree(params, kept))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, CompensatedState]:
        if params is None:
            raise InvalidArgumentError(params_needed("compensated(tx)", "to know what was lost in rounding them"))
        record = recorder(extra_args)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
        increments, kept = [], []
        for (path, added), parameter, k in zip(
            leaves, treedef.flatten_up_to(params), treedef.flatten_up_to(state.compensation), strict=True
        ):
            if added is None or k is None:
                if k is not None and record is not None:
                    record(Record(path, parameter, None, parameter, compensated=True))
                increments.append(added)
                kept.append(k)
                continue
            resolved = compensations.resolve(compensation, jax_ops.dtype_name(parameter))
            value = compensations.load(jax_ops, resolved, Stored(parameter, k))
            new = step(resolved, parameter, value, jax_ops.cast(added, "float32"), direct=record is not None)
            if record is not None:
                record(Record(path, parameter, new.increment, new.parameter, compensated=True))
            increments.append(new.increment)
            kept.append(new.compensation)
        return treedef.unflatten(increments), CompensatedState(inner_state, treedef.unflatten(kept))

    return optax.GradientTransformationExtraArgs(init, update)


def initial_leaf(compensation: str, parameter: Array) -> Array | Stochastic | None:
    """Return the compensation of a parameter that was never updated: zeros, or None where it is not compensated.

    Raises:
        InvalidArgumentError: split for a float16 parameter.
    """
    dtype = jax_ops.dtype_name(parameter)
    resolved = compensations.resolve(compensation, dtype)
    if resolved == "stochastic":
        return Stochastic()
    kept = compensations.compensation_dtype(resolved, dtype)
    return None if kept is None else jax_ops.zeros_like(parameter, kept)


def params_needed(transform: str, why: str) -> str:
    """Return the text of the error for an update without params."""
    return f"{transform} needs the parameters {why}, but update was called without them; call update(grads, state, params)."
