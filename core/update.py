"""The update of one tensor: the specification that every backend obeys.

`update` is what an optimizer does with a gradient; `accumulate` and `apply` are its halves, for micro-batches that go
straight into the rule's fields. All are pure. Numbers are read from and written to their storage dtypes once, at the ends; the
arithmetic between is the rule's (`core.rules`), in the compute dtype.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from . import codings
from . import compensation as compensations
from .array_ops import Array, ArrayOps
from .codings import Coded, EightBit, StateDtypes
from .compensation import Stored
from .debiasing import debiasing_ratio
from .dtypes import compute_dtype
from .hyperparameters import Hyperparameters, Scalar, is_zero
from .rules import Entered, Fields, Rule


class TensorState(NamedTuple):
    """What an optimizer keeps for one parameter between gradients.

    fields: the rule's, each of the parameter's shape, as `core.codings` stores them.
    compensation: the bits that a low-precision parameter cannot hold, or None.
    mean_square: 0-d, sum of the mean squares of the micro-batches already in the fields; 0 between updates.
    """

    fields: tuple[Coded, ...]
    compensation: Array | None
    mean_square: Array | float = 0.0


Bits = Callable[[int], Array | None]
"""Returns random bits of the parameter's shape, words of `core.random_bits`: of 0 for the parameter, of n for the nth field,
each None where it is rounded to nearest."""


def init_state(ops: ArrayOps, rule: Rule, parameter: Array, dtypes: StateDtypes, compensation: str) -> TensorState:
    """The state of a parameter that was never updated: zeros.

    Args:
        ops: the framework's casts.
        rule: whose fields are made.
        parameter: any shape.
        dtypes: of the fields, from `core.codings.state_dtypes`.
        compensation: resolved, from `core.compensation.resolve`.
    """
    kept = compensations.compensation_dtype(compensation, ops.dtype_name(parameter))
    fields = tuple(codings.zeros(ops, field, parameter, dtype) for field, dtype in zip(rule.fields, dtypes, strict=True))
    return TensorState(fields, None if kept is None else ops.zeros_like(parameter, kept))


def rebiased(ops: ArrayOps, moment: Coded, step: Scalar, before: Scalar, after: Scalar) -> Coded:
    r"""Return a moment that is debiased under one beta as debiased under another, before the first update that uses that.

        m <- m * (1-before^t)/(1-after^t)

    Adam's biased mean m*(1-before^t) stays what it is, so that the next update gives what Adam's does with its new beta. The
    product is in the compute dtype of the moment, and is rounded to its dtype once; of a coded moment, the scale is
    multiplied. A moment whose beta stays, or that was never updated, stays as it is.

    Args:
        moment: any shape, in the dtype in which it is stored.
        step: t, the number of updates so far; a Python number, or a 0-d array.
        before, after: beta1 or beta2; Python numbers, or 0-d arrays.
    """
    if isinstance(moment, EightBit):
        return EightBit(moment.codes, rebiased(ops, moment.scale, step, before, after))
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


def _loaded(ops: ArrayOps, fields: tuple[Coded, ...], dtype: str) -> Fields:
    return tuple(codings.load(ops, field, dtype) for field in fields)


def _stored(ops: ArrayOps, fields: Fields, state: TensorState, bits: Bits | None, unchanged: Fields = ()) -> tuple[Coded, ...]:
    """Return fields as they are stored; those among `unchanged` as they were: rounding them again would change them."""

    def stored(number: int, new: Array, old: Coded) -> Coded:
        if any(new is loaded for loaded in unchanged):
            return old
        return codings.store(ops, new, old, None if bits is None else bits(number))

    return tuple(map(stored, range(1, len(fields) + 1), fields, state.fields))


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
    before = _loaded(ops, state.fields, ops.dtype_name(parameter))
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
    if rule.of_matrix is not None:
        step = rule.of_matrix(ops, hyperparameters, step)
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
    bits: Bits | None = None,
) -> tuple[Array, TensorState]:
    """Return what one gradient adds to a parameter, and the new state with the old compensation.

    Args:
        parameter: the full number in the compute dtype, from `core.compensation.load`.
        gradient: of the parameter's shape, any floating-point dtype.
        corrections: of this update, from `Rule.corrections`.
        first: no micro-batch of this update is in the fields yet.
        mean_square, bits: see `update`.

    Returns:
        The increment in the compute dtype, -eta*(direction + decay*p), and the state with rounded fields.
    """
    fields, squares, entered = _accumulated(ops, rule, hyperparameters, corrections, parameter, gradient, state, first)
    squares = squares if mean_square is None else mean_square
    added = _stepped(ops, rule, hyperparameters, corrections, parameter, fields, squares, entered)
    if rule.after_step is not None:
        fields, added = rule.after_step(corrections, fields, added)
    return added, TensorState(_stored(ops, fields, state, bits), state.compensation)


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
    bits: Bits | None = None,
) -> tuple[Array, TensorState]:
    r"""One update of one tensor: the gradient of the only, or of the last, micro-batch, and the step.

        fields <- accumulate(fields, g)    eta = lr / max(1, sqrt(mean_square))
        p <- p - eta*(direction(fields) + decay*p)

    Args:
        ops: the framework's casts.
        rule: which optimizer.
        hyperparameters: validated.
        corrections: from `Rule.corrections`, for the number of this update.
        compensation: resolved: one of `core.compensation.COMPENSATIONS` but "auto".
        parameter: any shape, any of `core.dtypes.PARAMETER_DTYPES`.
        gradient: of the parameter's shape.
        state: of the parameter.
        first: no micro-batch of this update is in the fields yet.
        mean_square: of the whole tensor, 0-d, if `parameter` is only a part of it; from `accumulate` of all parts.
        bits: where the parameter or a field is rounded stochastically.

    Returns:
        The new parameter, in its dtype, and the new state.
    """
    dtype = ops.dtype_name(parameter)
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    added, state = increment(
        ops, rule, hyperparameters, corrections, number, gradient, state, first=first, mean_square=mean_square, bits=bits
    )
    stored = compensations.store(ops, compensation, number + added, dtype, None if bits is None else bits(0))
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
    bits: Bits | None = None,
) -> TensorState:
    """Put one micro-batch into the fields; the parameter does not change. Arguments as in `update`."""
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    fields, squares, _ = _accumulated(ops, rule, hyperparameters, corrections, number, gradient, state, first)
    return TensorState(_stored(ops, fields, state, bits), state.compensation, squares)


def apply(
    ops: ArrayOps,
    rule: Rule,
    hyperparameters: Hyperparameters,
    corrections: Any,
    compensation: str,
    parameter: Array,
    state: TensorState,
    *,
    bits: Bits | None = None,
) -> tuple[Array, TensorState]:
    """Step from fields that contain all micro-batches of the update. Arguments as in `update`."""
    dtype = ops.dtype_name(parameter)
    number = compensations.load(ops, compensation, Stored(parameter, state.compensation))
    fields = _loaded(ops, state.fields, compute_dtype(dtype))
    added = _stepped(ops, rule, hyperparameters, corrections, number, fields, state.mean_square, None)
    kept = state.fields
    if rule.after_step is not None:
        after, added = rule.after_step(corrections, fields, added)
        kept = _stored(ops, after, state, bits, unchanged=fields)
    stored = compensations.store(ops, compensation, number + added, dtype, None if bits is None else bits(0))
    return stored.parameter, TensorState(kept, stored.compensation)
