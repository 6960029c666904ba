"""The update of one tensor: the specification that every backend obeys.

`update` is what an optimizer does with a gradient; `accumulate` and `apply` are its halves, for micro-batches that go
straight into the rule's fields. All are pure. Numbers are read from and written to their storage dtypes once, at the ends; the
arithmetic between is the rule's (`core.rules`), in the compute dtype.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from . import compensation as compensations
from .array_ops import Array, ArrayOps
from .compensation import Stored
from .debiasing import debiasing_ratio
from .dtypes import StateDtypes, compute_dtype
from .hyperparameters import Hyperparameters, Scalar, is_zero
from .rules import Entered, Fields, Rule


class TensorState(NamedTuple):
    """What an optimizer keeps for one parameter between gradients.

    fields: the rule's, each of the parameter's shape.
    compensation: the bits that a low-precision parameter cannot hold, or None.
    mean_square: 0-d, sum of the mean squares of the micro-batches already in the fields; 0 between updates.
    """

    fields: Fields
    compensation: Array | None
    mean_square: Array | float = 0.0


def init_state(ops: ArrayOps, parameter: Array, dtypes: StateDtypes, compensation: str) -> TensorState:
    """The state of a parameter that was never updated: zeros.

    Args:
        ops: the framework's casts.
        parameter: any shape.
        dtypes: of the fields, from `core.dtypes.state_dtypes`.
        compensation: resolved, from `core.compensation.resolve`.
    """
    kept = compensations.compensation_dtype(compensation, ops.dtype_name(parameter))
    fields = tuple(ops.zeros_like(parameter, dtype) for dtype in dtypes)
    return TensorState(fields, None if kept is None else ops.zeros_like(parameter, kept))


def rebiased(ops: ArrayOps, moment: Array, step: Scalar, before: Scalar, after: Scalar) -> Array:
    r"""Return a moment that is debiased under one beta as debiased under another, before the first update that uses that.

        m <- m * (1-before^t)/(1-after^t)

    Adam's biased mean m*(1-before^t) stays what it is, so that the next update gives what Adam's does with its new beta. The
    product is in the compute dtype of the moment, and is rounded to its dtype once. A moment whose beta stays, or that
    was never updated, stays as it is.

    Args:
        moment: any shape, in the dtype in which it is stored.
        step: t, the number of updates so far; a Python number, or a 0-d array.
        before, after: beta1 or beta2; Python numbers, or 0-d arrays.
    """
    dtype = ops.dtype_name(moment)
    compute = compute_dtype(dtype)
    before, after, step = (x if isinstance(x, numbers.Real) else ops.cast(x, compute) for x in (before, after, step))
    ratio = debiasing_ratio(before, after, step, ops.xp)
    if isinstance(ratio, numbers.Real) and ratio == 1:
        return moment
    new = ops.cast(ops.cast(moment, compute) * ratio, dtype)
    return new if isinstance(ratio, numbers.Real) else ops.xp.where(ratio == 1, moment, new)


def prepared_gradient(
    ops: ArrayOps, rule: Rule, hyperparameters: Hyperparameters, gradient: Array, parameter: Array, *, first: bool
) -> Array:
    """Return the gradient that enters the moments: in the compute dtype, negated for maximize, with L2 on the first."""
    prepared = ops.cast(gradient, ops.dtype_name(parameter))
    if hyperparameters.maximize:
        prepared = -prepared
    if rule.l2 and first and not is_zero(hyperparameters.weight_decay):
        prepared = prepared + hyperparameters.weight_decay * parameter
    return prepared


def _upcast(ops: ArrayOps, fields: Fields, dtype: str) -> Fields:
    return tuple(ops.cast(field, dtype) for field in fields)


def _rounded(ops: ArrayOps, fields: Fields, state: TensorState) -> Fields:
    return tuple(ops.cast(new, ops.dtype_name(old)) for new, old in zip(fields, state.fields, strict=True))


def _accumulated(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    parameter: Array,
    gradient: Array,
    state: TensorState,
    first: bool,
) -> tuple[Fields, Array | float, Entered]:
    """Return the fields and the summed mean square after one more micro-batch, all in the compute dtype, as `parameter` is."""
    before = _upcast(ops, state.fields, ops.dtype_name(parameter))
    ready = prepared_gradient(ops, rule, hyperparameters, gradient, parameter, first=first)
    fields = rule.accumulate(hyperparameters, corrections, before, ready, ops.xp, first=first)
    entered = Entered(before, ready)
    if rule.mean_square is None:
        return fields, state.mean_square, entered
    square = rule.mean_square(hyperparameters, fields, ready, ops.xp)
    return fields, square if first else state.mean_square + square, entered


def _stepped(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    parameter: Array,
    fields: Fields,
    mean_square: Array | float,
    entered: Entered | None,
) -> Array:
    """Return the increment of the parameter, -eta*(direction + decay*p). All arrays are in the compute dtype.

    The decay is folded into the step: p*(1 - eta*decay) would round eta*decay away.
    """
    step = rule.direction(hyperparameters, corrections, fields, entered, ops.xp)
    decay = 0.0 if rule.l2 else hyperparameters.decay_rate
    if not is_zero(decay):
        step = step + decay * parameter
    eta = rule.step_size(hyperparameters)
    if rule.clips_update:
        eta = clipped_learning_rate(eta, mean_square, ops.xp)
    return -(eta * step)


def clipped_learning_rate(learning_rate: Scalar, mean_square: Array, xp: Any) -> Array:
    """eta = lr / max(1, sqrt(mean_square))."""
    return learning_rate / xp.clip(xp.sqrt(mean_square), 1.0, None)


def increment(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    parameter: Array,
    gradient: Array,
    state: TensorState,
    *,
    first: bool = True,
    mean_square: Array | None = None,
) -> tuple[Array, TensorState]:
    """Return what one gradient adds to a parameter, and the new state with the old compensation.

    Args:
        parameter: the full number in the compute dtype, from `core.compensation.load`.
        gradient: of the parameter's shape, any floating-point dtype.
        corrections: of this update, from `Rule.corrections`.
        first: no micro-batch of this update is in the fields yet.
        mean_square: see `update`.

    Returns:
        The increment in the compute dtype, -eta*(direction + decay*p), and the state with rounded fields.
    """
    fields, squares, entered = _accumulated(ops, rule, hyperparameters, corrections, parameter, gradient, state, first)
    squares = squares if mean_square is None else mean_square
    added = _stepped(ops, rule, hyperparameters, corrections, parameter, fields, squares, entered)
    return added, TensorState(_rounded(ops, fields, state), state.compensation)


def update(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    compensation: str,
    parameter: Array,
    gradient: Array,
    state: TensorState,
    *,
    first: bool = True,
    mean_square: Array | None = None,
    bits: Array | None = None,
) -> tuple[Array, TensorState]:
    r"""One update of one tensor: the gradient of the only, or of the last, micro-batch, and the step.

        fields <- accumulate(fields, g)    eta = lr / max(1, sqrt(mean_square))
        p <- p - eta*(direction(fields) + decay*p)

    Args:
        ops: the framework's casts.
        rule: which optimizer.
        hyperparameters: validated.
        corrections: from `Rule.corrections`, for the number of this update.
        compensation: resolved: "none", "kahan", "split" or "stochastic".
        parameter: any shape, any of `core.dtypes.PARAMETER_DTYPES`.
        gradient: of the parameter's shape.
        state: of the parameter.
        first: no micro-batch of this update is in the fields yet.
        mean_square: of the whole tensor, 0-d, if `parameter` is only a part of it; from `accumulate` of all parts.
        bits: of the parameter's shape, for "stochastic": words of `core.random_bits` for this update.

    Returns:
        The new parameter, in its dtype, and the new state.
    """
    dtype = ops.dtype_name(parameter)
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    added, state = increment(
        ops, rule, hyperparameters, corrections, number, gradient, state, first=first, mean_square=mean_square
    )
    stored = compensations.store(ops, compensation, number + added, dtype, bits)
    return stored.parameter, TensorState(state.fields, stored.compensation)


def accumulate(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    compensation: str,
    parameter: Array,
    gradient: Array,
    state: TensorState,
    *,
    first: bool,
) -> TensorState:
    """Put one micro-batch into the fields; the parameter does not change. Arguments as in `update`."""
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    fields, squares, _ = _accumulated(ops, rule, hyperparameters, corrections, number, gradient, state, first)
    return TensorState(_rounded(ops, fields, state), state.compensation, squares)


def apply(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    compensation: str,
    parameter: Array,
    state: TensorState,
    *,
    bits: Array | None = None,
) -> tuple[Array, TensorState]:
    """Step from fields that contain all micro-batches of the update. Arguments as in `update`."""
    dtype = ops.dtype_name(parameter)
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    fields = _upcast(ops, state.fields, compute_dtype(dtype))
    added = _stepped(ops, rule, hyperparameters, corrections, number, fields, state.mean_square, None)
    stored = compensations.store(ops, compensation, number + added, dtype, bits)
    return stored.parameter, TensorState(state.fields, stored.compensation)
