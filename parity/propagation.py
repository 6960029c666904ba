"""Carries the recursions of `parity.bounds`, where they are derived, along the reference's trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..core.codings import StateDtypes
from ..core.dtypes import compute_dtype
from ..core.rules.adam_family import AdamHyperparameters
from .bounds import (
    ARITHMETIC,
    CORRECTION,
    DECAY_RATE,
    INDEPENDENT_FROM,
    SIDES,
    Bound,
    RoundingErrors,
    Scatter,
    reference_debiasing,
    smallest_normal,
    spacing,
    stored_spacing,
    underflow,
    unit_roundoff,
)
from .cases import Problem, Storage

Number = float | np.ndarray
"""One for all elements, or one for each."""


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The hyperparameters of one update, each a number for all elements or a flat array with one for each.

    decay_rate: what multiplies the parameter inside the step; of a rule with an L2 term, inside the gradient.
    """

    learning_rate: Number
    decay_rate: Number
    beta1: Number
    beta2: Number

    @classmethod
    def of(cls, groups: Sequence[AdamHyperparameters], numbers: np.ndarray) -> Coefficients:
        """From the hyperparameters of groups, and the number of the group of every element."""

        def each(values: list[float]) -> Number:
            return values[0] if len(values) == 1 else np.array(values)[numbers]

        return cls(
            each([given.learning_rate for given in groups]),
            each([given.decay_rate for given in groups]),
            each([given.beta1 for given in groups]),
            each([given.beta2 for given in groups]),
        )


@dataclasses.dataclass(frozen=True)
class Point:
    """The reference around update number `step`: flat float64 arrays; `before` and `after` it.

    coefficients: None: those of the problem, which has neither schedule nor groups.
    previous: of the update before, if betas have changed since; the moments `before` are debiased under the new ones.
    """

    step: int
    gradient: np.ndarray  # as the moments take it: with Adam's L2 term
    exp_avg_before: np.ndarray
    exp_avg_sq_before: np.ndarray
    parameter_before: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    parameter: np.ndarray
    coefficients: Coefficients | None = None
    previous: Coefficients | None = None

    def coefficients_of(self, problem: Problem) -> Coefficients:
        """The hyperparameters of this update."""
        return self.coefficients or Coefficients.of([problem.hyperparameters], np.zeros(0))


_TINY = 1e-300  # keeps 0/0 away


class MomentErrors:
    """The rounding errors of exp_avg and exp_avg_sq. Without an L2 term they do not depend on the compensation."""

    def __init__(self, problem: Problem, dtypes: StateDtypes, n: int, *, flushes: bool) -> None:
        self.problem, self.flushes = problem, flushes
        self.dtypes = {field.name: dtype for field, dtype in zip(problem.rule.fields, dtypes, strict=True)}
        self.compute = compute_dtype(problem.dtype)
        self.exp_avg, self.exp_avg_sq = RoundingErrors(n), RoundingErrors(n)
        self.step = 0

    def advance(self, point: Point, parameter_error: np.ndarray | None) -> None:
        """One update; `parameter_error` bounds the parameter's error before it, where it enters the gradient (L2)."""
        if self.step == point.step:  # shared with another storage
            return
        self.step = point.step
        given, gradient = point.coefficients_of(self.problem), np.abs(point.gradient)
        if point.previous is not None:
            self._change_beta(self.exp_avg, "exp_avg", point, point.previous.beta1, given.beta1)
            self._change_beta(self.exp_avg_sq, "exp_avg_sq", point, point.previous.beta2, given.beta2)
        decay = given.decay_rate
        square = gradient**2
        first, second = np.abs(point.gradient - point.exp_avg_before), np.abs(square - point.exp_avg_sq_before)
        firsts, seconds = [first, first], [second, second, square]
        echoes: tuple[Number, Number] = (0.0, 0.0)
        remainder: Number = 0.0
        if parameter_error is not None:
            l2 = gradient + decay * np.abs(point.parameter_before)
            firsts += [l2, l2]
            seconds += [2.0 * gradient * l2] * 2
            rounding = 2.0 * SIDES[self.compute] * unit_roundoff(self.compute) * l2  # where g + decay*p all but cancels, ...
            remainder = rounding**2  # ... its square counts
            echo = decay * parameter_error
            echoes = (echo, echo * (2.0 * gradient + echo))
        self._add(self.exp_avg, "exp_avg", given.beta1, point, firsts, echoes[0], 0.0)
        self._add(self.exp_avg_sq, "exp_avg_sq", given.beta2, point, seconds, echoes[1], remainder)

    def _change_beta(self, errors: RoundingErrors, name: str, point: Point, before: Number, after: Number) -> None:
        """A moment times (1-before^t)/(1-after^t), with the errors so far; roundings of the ratio, product and storage."""
        updates, dtype = point.step - 1, self.dtypes[name]
        errors.decay(np.expm1(updates * np.log(before)) / np.expm1(updates * np.log(after)))
        value = np.abs(getattr(point, f"{name}_before"))
        errors.linear += (2 * CORRECTION + 1) * SIDES[self.compute] * unit_roundoff(self.compute) * value
        errors.linear += underflow(self.compute, flushes=self.flushes)
        if self.compute == "float64":
            errors.linear += value * (reference_debiasing(before, updates) + reference_debiasing(after, updates))
        if dtype != self.compute:
            stored = spacing(dtype, value + errors.linear + errors.worst)
            errors.linear += spacing(dtype, value + errors.linear + errors.worst + stored / 2.0) / 2.0

    def _add(
        self,
        errors: RoundingErrors,
        name: str,
        beta: Number,
        point: Point,
        magnitudes: list[np.ndarray],
        echo: Number,
        remainder: Number,
    ) -> None:
        """Roundings of a moment: u times the correction times `magnitudes`; the sum's; the storage's."""
        correction = (1.0 - beta) / -np.expm1(point.step * np.log(beta))
        value, dtype = getattr(point, name), self.dtypes[name]
        unit, sides = unit_roundoff(self.compute), SIDES[self.compute]
        increment = value - getattr(point, f"{name}_before")
        spread = errors.spread(increment)
        moved = np.abs(increment) + correction * (errors.linear + errors.worst + errors.echo + echo)
        errors.decay(1.0 - correction)
        errors.echo += correction * echo
        errors.linear += correction * (CORRECTION * sides * unit * magnitudes[0] + remainder)
        errors.linear += underflow(self.compute, flushes=self.flushes)
        # where a rounding may have carried the number across a power of two, its spacing is the wider one
        reach = np.abs(value) + errors.linear + errors.echo
        halves = np.abs(value) + correction * sum(magnitudes)
        squares = value**2 + correction**2 * sum(magnitude**2 for magnitude in magnitudes)
        if self.compute == "float64":
            errors.passing = np.abs(value) * reference_debiasing(beta, point.step)
        independent = spread >= INDEPENDENT_FROM * 2.0 * unit * reach
        errors.add_sums(sides * unit * halves, sides * unit**2 * squares, independent)
        if dtype != self.compute:
            stored = spacing(dtype, reach)
            stored = spacing(dtype, reach + stored / 2.0)
            # the stored number could have stayed: it never rounds by more than it was to move
            errors.add(np.minimum(stored / 2.0, moved), spread >= INDEPENDENT_FROM * stored)


class Propagation:
    """Carries the rounding errors of one case along the reference's trajectory.

    Args:
        problem: rule, hyperparameters, dtype.
        storage: compensation and state dtype.
        n: elements of the case.
        moments: of another propagation of the problem with the same state dtypes; shared unless an L2 term forbids it.
        flushes: whether the device may flush subnormal numbers to zero.
    """

    def __init__(
        self, problem: Problem, storage: Storage, n: int, moments: MomentErrors | None = None, *, flushes: bool = True
    ) -> None:
        self.problem, self.flushes = problem, flushes
        self.compensation = storage.compensation
        self.compute = compute_dtype(problem.dtype)
        if moments is None or problem.rule.l2:
            moments = MomentErrors(problem, storage.moments(problem), n, flushes=flushes)
        self.moments = moments
        self.parameter = RoundingErrors(n)
        self.sums_of_reference = (Scatter(), Scatter())

    def advance(self, point: Point) -> None:
        """One update."""
        l2 = self.problem.rule.l2
        # an error of the parameter that comes back through the gradient shrinks; only the moments themselves show it
        self.moments.advance(point, self.parameter.bound().elements if l2 else None)
        increment = point.parameter - point.parameter_before
        before = self.parameter.linear + self.parameter.worst
        step = self._step(point)
        moved = np.abs(increment) + self.parameter.linear + self.parameter.worst - before
        self._store(point.parameter, increment, step, moved)

    def bounds(self) -> dict[str, Bound]:
        """The bounds on parameter, exp_avg and exp_avg_sq after the last update."""
        return {
            "parameter": self.parameter.bound(),
            "exp_avg": self.moments.exp_avg.bound(),
            "exp_avg_sq": self.moments.exp_avg_sq.bound(),
        }

    def _step(self, point: Point) -> np.ndarray:
        """Return the error of this step from the moments, the scalars and its own arithmetic, and its magnitude."""
        rule, unit, sides = self.problem.rule, unit_roundoff(self.compute), SIDES[self.compute]
        given = point.coefficients_of(self.problem)
        lr = given.learning_rate
        parameter, root = np.abs(point.parameter_before), np.sqrt(point.exp_avg_sq)
        q = root + rule.defaults["eps"]
        direction = np.abs(point.exp_avg) / q
        decay = 0.0 if rule.l2 else given.decay_rate
        step = lr * (direction + decay * parameter)
        errors, exp_avg, exp_avg_sq = self.parameter, self.moments.exp_avg, self.moments.exp_avg_sq

        lowest = smallest_normal(self.compute)
        flushed = lowest if self.flushes else 0.0  # where it is read
        linear = exp_avg_sq.linear + flushed
        of_linear = _of_root(point.exp_avg_sq, root, linear, rule.defaults["eps"])
        of_worst = _of_root(point.exp_avg_sq, root, linear + exp_avg_sq.worst, rule.defaults["eps"]) - of_linear
        deviation = np.sqrt(exp_avg_sq.variance) / (2.0 * np.maximum(root, lowest))
        errors.persistent += lr * (np.sqrt(exp_avg.variance) + direction * deviation) / q
        errors.worst += lr * (exp_avg.worst / q + direction * of_worst)
        errors.linear += lr * ((exp_avg.linear + flushed) / q * (1.0 + of_linear) + direction * of_linear)
        errors.linear += underflow(self.compute, flushes=self.flushes)
        if rule.clips_update:
            self._clip(point, step)

        errors.linear += sides * unit * (step + DECAY_RATE * lr * decay * parameter)  # lr and decay rate
        if self.compute == "float64":  # the reference's own 1 - beta^t
            lost = reference_debiasing(given.beta1, point.step) + reference_debiasing(given.beta2, point.step)
            errors.linear += lr * direction * lost
            self._sums_of_reference(point, lr * np.copysign(direction, point.exp_avg), lr * decay * point.parameter_before)
        return step

    def _sums_of_reference(self, point: Point, *increments: np.ndarray) -> None:
        """The roundings of the two sums in which the reference changes a parameter."""
        computed = spacing(self.compute, np.abs(point.parameter) + self.parameter.linear)
        for scatter, increment in zip(self.sums_of_reference, increments, strict=True):
            self.parameter.add(computed / 2.0, scatter.after(increment) >= INDEPENDENT_FROM * computed)

    def _store(self, parameter: np.ndarray, increment: np.ndarray, step: np.ndarray, moved: np.ndarray) -> None:
        """The roundings of the step's arithmetic, of the sum, and of the storage."""
        errors, dtype, unit = self.parameter, self.problem.dtype, unit_roundoff(self.compute)
        spread = errors.spread(increment)
        errors.add(unit * step, spread >= INDEPENDENT_FROM * 2.0 * unit * step, ARITHMETIC * SIDES[self.compute])
        reach = np.abs(parameter) + errors.linear
        computed = spacing(self.compute, reach)
        errors.add(computed / 2.0, spread >= INDEPENDENT_FROM * computed, 1 + (self.compensation == "kahan"))
        if dtype == self.compute or self.compensation == "split":
            return
        stored = stored_spacing(dtype, self.compensation, reach)
        stored = stored_spacing(dtype, self.compensation, reach + stored / 2.0)
        half = np.minimum(stored / 2.0, moved) if self.compensation == "none" else stored / 2.0
        errors.add(half, spread >= INDEPENDENT_FROM * stored)

    def _clip(self, point: Point, step: np.ndarray) -> None:
        """What the errors of v do to eta of StableAdamW: a weighted mean over the elements of the tensor, halved."""
        numbers, eps, unit = self.problem.tensor_numbers(), self.problem.rule.defaults["eps"], unit_roundoff(self.compute)
        ratio = point.gradient**2 / np.maximum(point.exp_avg_sq, eps**2)
        sizes = np.maximum(np.bincount(numbers), 1)
        total = np.bincount(numbers, ratio)
        clipping = total > 0.25 * sizes  # below, no error of v can bring the mean above 1
        scale = np.where(clipping, 1.0 / np.where(total > 0.0, total, 1.0), 0.0)
        ratio = np.where(point.exp_avg_sq > eps**2, ratio, 0.0)
        errors, exp_avg_sq = self.parameter, self.moments.exp_avg_sq
        inverse = 1.0 / np.maximum(point.exp_avg_sq, eps**2)  # below, the ratio is 0
        deviation = np.sqrt(exp_avg_sq.variance) * inverse / 2.0
        worst, linear = _of_inverse_root(exp_avg_sq.worst * inverse), _of_inverse_root(exp_avg_sq.linear * inverse)

        def mean(values: np.ndarray) -> np.ndarray:
            return (scale * np.bincount(numbers, ratio * values))[numbers]

        rounding = unit * np.sqrt((sizes + 4) * clipping / 12.0)[numbers]
        random = np.sqrt(scale**2 * np.bincount(numbers, (ratio * deviation) ** 2))[numbers]
        errors.shared += step * (random + rounding)
        errors.worst += step * (mean(worst) + unit * ((sizes + 4) * clipping / 2.0)[numbers])
        errors.linear += step * mean(linear)


def _of_root(v: np.ndarray, root: np.ndarray, error: np.ndarray, eps: float) -> np.ndarray:
    """max |q/q' - 1| for q = root + eps, where root = sqrt(v), and q' that of any number from v-error to v+error."""
    low, high = np.sqrt(np.maximum(v - error, 0.0)), np.sqrt(v + error)
    # without the differences of nearly equal roots; an error is never zero
    below = np.minimum(error, v) / (root + low + _TINY)
    above = error / (root + high)
    return np.maximum(below / (low + eps), above / (high + eps))


def _of_inverse_root(relative: np.ndarray) -> np.ndarray:
    """1/sqrt(1-x) - 1: what a relative error x of v does to 1/sqrt(v), at most."""
    return 1.0 / np.sqrt(1.0 - np.minimum(relative, 0.9)) - 1.0
