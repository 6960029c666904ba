r"""Compensation through Optax: an increment in the parameter's dtype, and the bits that adding it will lose.

The exact new value is x, a number of the compute dtype; the parameter in memory becomes p'. `core.compensation` says how
p' and k hold x. An Optax transform cannot return p', only an increment u that its caller adds, so here

    u = cast(p' - p)        q = cast(p + u)        k = what q lacks of x

where q is what optax.apply_updates will produce. While p/2 <= p' <= 2p, p' - p is exact and q = p'; beyond, q may miss p'
by a spacing or so, and k saturates at what it can hold: kahan rounds, split stops half a bfloat16 spacing from q.
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
from .direct import as_transformation, destination_of
from .state import CompensatedState, PyTree, compensated_leaves, initial_compensation

_MAGNITUDE = 0x7FFFFFFF  # a float32's bits without its sign
_INT16 = (-0x8000, 0x7FFF)


class Stepped(NamedTuple):
    """One parameter after an update.

    update: the increment, in the parameter's dtype.
    parameter: the exact new parameter, in its dtype.
    compensation: k, against the exact parameter or against what adding the increment gives, as was asked; or None.
    """

    update: Array
    parameter: Array
    compensation: Array | None


def lacking(compensation: str, exact: Array, reached: Array) -> Array:
    """k of a parameter that is `reached` and should be `exact`, or as near to that as k can bring it.

    Args:
        compensation: "kahan" or "split".
        exact: float32.
        reached: float32, a number of the parameter's dtype.

    Returns:
        float32 for kahan (to be cast), int16 for split.
    """
    ops, xp = jax_ops, jax_ops.xp
    if compensation == "kahan":
        return xp.where(xp.isfinite(reached), exact - reached, 0.0)
    exact_bits, reached_bits = ops.bitcast(exact, "int32"), ops.bitcast(reached, "int32")
    # Bits count as numbers only within one sign: from the other side of zero, zero is the nearest.
    same_sign = (exact_bits ^ reached_bits) >= 0
    magnitude = xp.where(same_sign, exact_bits & _MAGNITUDE, 0)
    kept = xp.clip(magnitude - (reached_bits & _MAGNITUDE), *_INT16)
    return ops.cast(xp.where(xp.isnan(reached), 0, kept), "int16")


def step(compensation: str, parameter: Array, wide: Array, added: Array, *, direct: bool) -> Stepped:
    """Add `added` to a parameter.

    Args:
        compensation: resolved: "none", "kahan" or "split".
        parameter: as it lies in memory.
        wide: the number that it and its compensation stand for, in the compute dtype.
        added: what the update adds to that number, in the compute dtype.
        direct: the exact new parameter will be taken; otherwise the increment will be added.
    """
    ops, xp = jax_ops, jax_ops.xp
    dtype = ops.dtype_name(parameter)
    exact = wide + added
    stored = compensations.store(ops, compensation, exact, dtype)
    if compensation == "none":
        return Stepped(ops.cast(added, dtype), stored.parameter, None)
    old, new = ops.cast(parameter, "float32"), ops.cast(stored.parameter, "float32")
    increment = ops.round_to(xp.where(new == old, 0.0, new - old), dtype)  # an infinity stays one
    kept = stored.compensation
    if not direct:
        reached = ops.round_to(old + increment, dtype)
        kept = ops.cast(lacking(compensation, exact, reached), ops.dtype_name(kept))
    return Stepped(ops.cast(increment, dtype), stored.parameter, kept)


def compensated(tx: optax.GradientTransformation, compensation: str = "auto") -> optax.GradientTransformationExtraArgs:
    r"""Keep the bits that low-precision parameters lose when the updates of `tx` are added to them.

        x = p + k + u        p <- cast(x)        k <- x - p

    float32 and float64 parameters are left alone. The updates stay in the parameters' dtype. With `optax.apply_updates`
    the result is exact while p/2 <= p' <= 2p and saturates beyond; in `make_update` and `make_train_step` it always is.

    It must be the last transform in a chain: whatever changes the updates afterwards makes the kept bits wrong. So do
    wrappers such as `optax.lookahead` and `optax.contrib.schedule_free`; under them use compensation="none". `make_update`
    and `make_train_step` refuse both; with `optax.apply_updates` alone nothing can see it.

    Args:
        tx: any Optax transform whose updates are added to parameters. It sees the parameters, not the kept bits.
        compensation: "auto" (split for bfloat16, kahan for float16), "kahan" (k in the parameter's dtype), "split"
            (bfloat16 only: an int16 k makes up the float32 value) or "none".

    Returns:
        A transform with a `CompensatedState`; its update needs params.

    Raises:
        InvalidArgumentError: an unknown compensation; at init, split for float16, or a tx that compensates already.

    References:
        Kahan, Further remarks on reducing truncation errors, 1965; Zamirai et al., https://arxiv.org/abs/2010.06192.
    """
    compensations.resolve(compensation, "bfloat16")
    inner = as_transformation(tx)

    def init(params: PyTree) -> CompensatedState:
        state = inner.init(params)
        if compensated_leaves(state):
            raise InvalidArgumentError(
                "compensated(tx): tx compensates its updates itself already; leave compensated() out, or build tx with "
                "compensation='none'."
            )
        kept = [initial_leaf(compensation, leaf) for leaf in jax.tree.leaves(params)]
        return CompensatedState(state, initial_compensation(params, kept))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, CompensatedState]:
        if params is None:
            raise InvalidArgumentError(params_needed("compensated(tx)", "to know what was lost in rounding them"))
        destination = destination_of(extra_args)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
        stepped, kept = [], []
        for added, parameter, k in zip(
            leaves, treedef.flatten_up_to(params), treedef.flatten_up_to(state.compensation), strict=True
        ):
            if added is None and k is not None and destination is not None:
                destination.without_gradient += 1
            if added is None or k is None:
                stepped.append(added)
                kept.append(k)
                continue
            resolved = compensations.resolve(compensation, jax_ops.dtype_name(parameter))
            wide = compensations.load(jax_ops, resolved, Stored(parameter, k))
            new = step(resolved, parameter, wide, jax_ops.cast(added, "float32"), direct=destination is not None)
            if destination is not None:
                destination.put(new.update, new.parameter, compensated=True)
            stepped.append(new.update)
            kept.append(new.compensation)
        return treedef.unflatten(stepped), CompensatedState(inner_state, treedef.unflatten(kept))

    return optax.GradientTransformationExtraArgs(init, update)


def initial_leaf(compensation: str, parameter: Array) -> Array | None:
    """The compensation of a parameter that was never updated: zeros, or None where there is nothing to compensate.

    Raises:
        InvalidArgumentError: split for a float16 parameter.
    """
    dtype = jax_ops.dtype_name(parameter)
    kept = compensations.compensation_dtype(compensations.resolve(compensation, dtype), dtype)
    return None if kept is None else jax_ops.zeros_like(parameter, kept)


def params_needed(transform: str, why: str) -> str:
    """The text of the error for an update without params."""
    return f"{transform} needs the parameters {why}, but update was called without them; call update(grads, state, params)."
