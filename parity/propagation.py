"""Carries the recursions of `parity.bounds`, where they are derived, along the reference's trajectory.

How errors go through a rule, and what its operations round, its own functions say, on `parity.tracked` arrays; here is what all
rules have in common: weight decay, the step, storage, changing betas, and StableAdamW's mean over a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.codings import StateDtypes
from ..core.dtypes import compute_dtype
from ..core.hyperparameters import Hyperparameters, is_zero
from ..core.rules import Entered
from .bounds import (
    ARITHMETIC,
    CORRECTION,
    DECAY_RATE,
    IMPLICIT,
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
from .matrices import orthogonalised
from .noise import NONE, Input, Noise, both
from .rules import corrections
from .tracked import Namespace, Tracked

Values = Mapping[str, np.ndarray]
"""Flat float64 arrays: "parameter", and the rule's fields by name, as backends keep them."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The reference around one micro-batch, the only one of an update unless said otherwise.

    step: number of the update. given: its hyperparameters. gradient: flat, without an L2 term. before, after: what the
    reference holds; of several micro-batches the parameter changes after the last. error: what a backend's gradient is off by.
    first: no micro-batch of the update came before.
    previous: of the update before, if betas have changed since; the fields `before` are debiased under the new ones.
    """

    step: int
    given: Hyperparameters
    gradient: np.ndarray
    before: Values
    after: Values
    error: np.ndarray | None = None
    first: bool = True
    previous: Hyperparameters | None = None


class FieldErrors:
    """The rounding errors of a rule's fields. Without an L2 term they do not depend on the compensation."""

    def __init__(self, problem: Problem, dtypes: StateDtypes, n: int, *, flushes: bool) -> None:
        self.rule, self.flushes, self.n = problem.rule, flushes, n
        self.shape = next(iter(problem.setting.shapes.values()))
        self.names = [field.name for field in problem.rule.fields]
        self.dtypes = dict(zip(self.names, dtypes, strict=True))
        self.compute = compute_dtype(problem.dtype)
        self.xp = Namespace(self.compute)
        self.errors = {name: RoundingErrors(n) for name in self.names}
        self.underflow = max(1.0, len(self.names) / 2.0) * underflow(self.compute, flushes=flushes)
        self.entered: Entered | None = None
        self._point: Point | None = None
        self._stepped: Point | None = None

    def advance(self, point: Point, parameter_error: np.ndarray | None) -> None:
        """One micro-batch; `parameter_error` bounds the parameter's error before it, where it enters the gradient (L2)."""
        if self._point is point:  # shared with another storage
            return
        self._point = point
        if point.previous is not None:
            self._change_betas(point, point.previous)
        xp, given = self.xp, point.given
        gradient = xp.tracked(point.gradient) if point.error is None else xp.given(point.gradient, Input(linear=point.error))
        if parameter_error is not None and point.first and not is_zero(given.weight_decay):
            gradient = gradient + xp.stored(given.weight_decay) * xp.given(
                point.before["parameter"], Input(echo=parameter_error)
            )
        before = tuple(self._input(name, point.before[name]) for name in self.names)
        if self.rule.needs_gradient:
            self.entered = Entered(self._read(point.before), gradient)
        scalars = corrections(self.rule, given, point.step, self.compute)
        with np.errstate(over="ignore"):  # of a selection's other side
            found = self.rule.accumulate(given, scalars, before, gradient, xp, first=point.first)
        for name, old, new in zip(self.names, before, found, strict=True):
            if new is not old or self.rule.after_step is None:
                self._enter(name, point, next(iter(old.slopes)), new)

    def direction(self, point: Point) -> tuple[np.ndarray, Noise, int]:
        """That of an update, from the fields after it: its value, its errors, and how many elements they leave undecided."""
        if self._stepped is not point:  # of another storage that shares the fields
            self._stepped, scalars = point, corrections(self.rule, point.given, point.step, self.compute)
            before = self.xp.undecided
            direction = self.rule.direction(point.given, scalars, self._read(point.after), self.entered, self.xp)
            if self.rule.of_matrix is not None:
                direction = self._of_matrix(point.given, direction)
            self._direction = direction.value, direction.whole, self.xp.undecided - before
        return self._direction

    def _of_matrix(self, given: Any, direction: Tracked) -> Tracked:
        """The step of a rule that takes whole matrices, of a problem that has one."""
        matrix = Tracked(
            self.xp, direction.value.reshape(self.shape), {}, Noise(linear=both(direction.most.reshape(self.shape)))
        )
        found = orthogonalised(self.xp, given, matrix)
        return Tracked(self.xp, found.value.reshape(-1), {}, Noise(linear=both(found.most.reshape(-1))))

    def after_step(self, point: Point, step: np.ndarray, noise: Noise) -> Noise:
        """The errors of what is added to the parameter in place of a step that has these, and of the fields that follow."""
        if self.rule.after_step is None:
            return noise
        fields = tuple(self._input(name, point.before[name]) for name in self.names)
        scalars = corrections(self.rule, point.given, point.step, self.compute)
        found, added = self.rule.after_step(scalars, fields, Tracked(self.xp, step, {}, noise))
        for name, old, new in zip(self.names, fields, found, strict=True):
            if new is old:
                continue
            self._enter(name, point, next(iter(old.slopes)), new)
            # the reference has the difference of two parameters, with their roundings
            self.errors[name].linear += 2.0 * spacing("float64", point.before["parameter"])
        return added.whole

    def _input(self, name: str, value: np.ndarray, more: Any = 0.0) -> Tracked:
        errors = self.errors[name]
        return self.xp.given(value, Input(np.sqrt(errors.variance), errors.worst, errors.linear + more, errors.echo))

    def _read(self, values: Values) -> tuple[Tracked, ...]:
        """The fields where the step reads them: off by what is flushed there, and by the reference's own debiasing."""
        flushed = smallest_normal(self.compute) if self.flushes else 0.0
        return tuple(self._input(name, values[name], self.errors[name].passing + flushed) for name in self.names)

    def _enter(self, name: str, point: Point, old: Input, new: Tracked) -> None:
        """The errors of a field after a micro-batch: those it had, what comes in, its roundings, and its storage's."""
        errors, value, dtype, unit = self.errors[name], point.after[name], self.dtypes[name], unit_roundoff(self.compute)
        increment = value - point.before[name]
        spread = errors.spread(increment) if point.first else np.zeros_like(value)
        noise = new.whole
        way = {**new.slopes, old: new.slopes.get(old, 0.0) - 1.0}  # from where the stored number was
        moved = np.abs(increment) + Tracked(self.xp, value, way, new.noise._replace(halves=NONE)).most
        zeros = np.zeros(self.n)
        errors.variance = zeros + noise.deviation**2
        errors.worst, errors.linear, errors.echo = zeros + noise.worst.most, zeros + noise.linear.most, zeros + noise.echo
        errors.linear += self.underflow
        # where a rounding may have carried the number across a power of two, its spacing is the wider one
        reach = np.abs(value) + errors.linear + errors.echo
        if self.compute == "float64":
            errors.passing = np.abs(value) * self._lost(name, point)
        independent = spread >= INDEPENDENT_FROM * 2.0 * unit * reach
        errors.add_sums(zeros + noise.halves, zeros + noise.squares, independent)
        if dtype != self.compute:
            stored = spacing(dtype, reach)
            stored = spacing(dtype, reach + stored / 2.0)
            half = np.minimum(stored / 2.0, moved) if point.first else stored / 2.0
            # the stored number could have stayed: it never rounds by more than it was to move
            errors.add(half, spread >= INDEPENDENT_FROM * stored)

    def _lost(self, name: str, point: Point) -> float:
        """The relative error of the reference's own debiasing."""
        beta = dict(zip(self.names, self.rule.decays(point.given), strict=True))[name]
        return 0.0 if beta is None else float(reference_debiasing(beta, point.step))

    def _change_betas(self, point: Point, previous: Hyperparameters) -> None:
        """A field times (1-before^t)/(1-after^t), with the errors so far; roundings of the ratio, product and storage."""
        updates = point.step - 1
        decays = zip(self.names, self.rule.decays(previous), self.rule.decays(point.given), strict=True)
        for name, before, after in decays:
            if before is None or after is None:
                continue
            errors, dtype, value = self.errors[name], self.dtypes[name], np.abs(point.before[name])
            errors.decay(np.expm1(updates * np.log(before)) / np.expm1(updates * np.log(after)))
            errors.linear += (2 * CORRECTION + 1) * SIDES[self.compute] * unit_roundoff(self.compute) * value
            errors.linear += underflow(self.compute, flushes=self.flushes)
            if self.compute == "float64":
                errors.linear += value * (reference_debiasing(before, updates) + reference_debiasing(after, updates))
            if dtype != self.compute:
                stored = spacing(dtype, value + errors.linear + errors.worst)
                errors.linear += spacing(dtype, value + errors.linear + errors.worst + stored / 2.0) / 2.0


class Propagation:
    """Carries the rounding errors of tensors with equal hyperparameters along the reference's trajectory.

    Args:
        problem: rule, hyperparameters, dtype.
        storage: compensation and state dtype.
        numbers: for every element, the number of its tensor, from 0 on.
        fields: of another propagation of the problem with the same state dtypes; shared unless an L2 term forbids it.
        flushes: whether the device may flush subnormal numbers to zero.
    """

    def __init__(
        self,
        problem: Problem,
        storage: Storage,
        numbers: np.ndarray,
        fields: FieldErrors | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        self.rule, self.dtype, self.flushes, self.numbers = problem.rule, problem.dtype, flushes, numbers
        self.compensation = storage.compensation
        self.compute = compute_dtype(problem.dtype)
        if fields is None or problem.rule.l2 or problem.rule.after_step is not None:
            fields = FieldErrors(problem, storage.moments(problem), numbers.size, flushes=flushes)
        self.fields = fields
        self.parameter = RoundingErrors(numbers.size, typical=True)
        self.sums_of_reference = (Scatter(), Scatter())
        self.undecided = 0

    def advance(self, point: Point) -> None:
        """One update of one micro-batch."""
        self.accumulate(point)
        self.step(point)

    def accumulate(self, point: Point) -> None:
        """One micro-batch."""
        # an error of the parameter that comes back through the gradient shrinks; only the fields themselves show it
        self.fields.advance(point, self.parameter.bound().elements if self.rule.l2 else None)

    def step(self, point: Point, clipped_by: np.ndarray | None = None) -> None:
        """The step after the last micro-batch; `clipped_by`: the gradient whose squares a mean square is of, if another one."""
        increment = point.after["parameter"] - point.before["parameter"]
        before = self.parameter.linear + self.parameter.worst
        signed, step, halves, squares = self._step(point, point.gradient if clipped_by is None else clipped_by)
        moved = np.abs(increment) + self.parameter.linear + self.parameter.worst - before
        # between two that go back, as Ranger's do, steps may be all alike: what goes back is not scatter
        scattered = increment if self.rule.after_step is None else signed
        self._store(point.after["parameter"], scattered, step, halves, squares, moved)

    def forget(self, *, parameter: np.ndarray, fields: np.ndarray) -> None:
        """Drop the errors of elements whose true numbers are not finite."""
        self.parameter.forget(parameter)
        for errors in self.fields.errors.values():
            errors.forget(fields)

    @property
    def errors(self) -> dict[str, RoundingErrors]:
        """By quantity."""
        return {"parameter": self.parameter, **self.fields.errors}

    def _step(self, point: Point, gradient: np.ndarray) -> tuple[np.ndarray, ...]:
        """Add the errors of this step from the fields and the scalars.

        Returns:
            It, as it is added to the parameter; its magnitude; its roundings: the sum of all, and that of their squares.
        """
        rule, unit, given = self.rule, SIDES[self.compute] * unit_roundoff(self.compute), point.given
        lr, parameter = given.learning_rate, np.abs(point.before["parameter"])
        direction, noise, undecided = self.fields.direction(point)
        self.undecided += undecided
        decay = 0.0 if rule.l2 else given.decay_rate
        step = lr * (np.abs(direction) + decay * parameter)
        errors, noise = self.parameter, noise.times(lr)
        if rule.clips_update:
            self._clip(point, gradient, step)
        linear = noise.linear.most + self.fields.underflow
        linear = linear + unit * (step + DECAY_RATE * lr * decay * parameter)  # lr and decay rate
        if rule.implicit_decay:
            linear = linear + IMPLICIT * unit * step
        if rule.after_step is not None:  # the decay has the parameter's error, which does not shrink in a field
            linear = linear + lr * decay * errors.bound().elements
        if self.compute == "float64":
            if rule.implicit_decay:  # the reference divides by 1 + lr*decay, which is rounded alike at every step
                errors.linear += unit * parameter
            self._sums_of_reference(point, lr * direction, lr * decay * point.before["parameter"])
        # the decay's product, the sum, the product with lr; and what some devices have off by more than a unit
        halves = np.maximum(ARITHMETIC * unit * step, noise.halves + 3.0 * unit * step)
        squares = np.maximum(ARITHMETIC * SIDES[self.compute] * (unit / SIDES[self.compute] * step) ** 2, noise.squares)
        made = Noise(noise.deviation, both(noise.worst.most), both(linear), NONE, halves, squares)
        signed = -lr * (direction + decay * point.before["parameter"])
        added = self.fields.after_step(point, signed, made)
        errors.persistent += added.deviation
        errors.worst += added.worst.most
        errors.linear += added.linear.most
        return signed, step, added.halves, added.squares

    def _sums_of_reference(self, point: Point, *increments: np.ndarray) -> None:
        """The roundings of the two sums in which the reference changes a parameter."""
        computed = spacing(self.compute, np.abs(point.after["parameter"]) + self.parameter.linear)
        for scatter, increment in zip(self.sums_of_reference, increments, strict=True):
            independent = scatter.after(increment) >= INDEPENDENT_FROM * computed
            self.parameter.add(computed / 2.0, independent & (not self.fields.xp.discrete))

    def _store(
        self,
        parameter: np.ndarray,
        increment: np.ndarray,
        step: np.ndarray,
        halves: np.ndarray,
        squares: np.ndarray,
        moved: np.ndarray,
    ) -> None:
        """The roundings of the step's arithmetic, of the sum, and of the storage."""
        errors, dtype, unit = self.parameter, self.dtype, unit_roundoff(self.compute)
        spread = errors.spread(increment)
        if self.fields.xp.discrete:
            spread = np.zeros_like(spread)
        size = np.maximum(unit * step, halves / (ARITHMETIC * SIDES[self.compute]))
        errors.add_sums(halves, squares, spread >= INDEPENDENT_FROM * 2.0 * size)
        reach = np.abs(parameter) + errors.linear
        computed = spacing(self.compute, reach)
        errors.add(computed / 2.0, spread >= INDEPENDENT_FROM * computed, 1 + (self.compensation == "kahan"))
        if dtype == self.compute or self.compensation == "split":
            return
        stored = stored_spacing(dtype, self.compensation, reach)
        stored = stored_spacing(dtype, self.compensation, reach + stored / 2.0)
        half = np.minimum(stored / 2.0, moved) if self.compensation == "none" else stored / 2.0
        errors.add(half, spread >= INDEPENDENT_FROM * stored)

    def _clip(self, point: Point, gradient: np.ndarray, step: np.ndarray) -> None:
        """What the errors of v do to eta of StableAdamW: a weighted mean over the elements of the tensor, halved."""
        numbers, eps, unit = self.numbers, point.given.eps, unit_roundoff(self.compute)  # type: ignore[attr-defined]
        exp_avg_sq, errors, of_square = point.after["exp_avg_sq"], self.parameter, self.fields.errors["exp_avg_sq"]
        ratio = gradient**2 / np.maximum(exp_avg_sq, eps**2)
        sizes = np.maximum(np.bincount(numbers), 1)
        total = np.bincount(numbers, ratio)
        clipping = total > 0.25 * sizes  # below, no error of v can bring the mean above 1
        scale = np.where(clipping, 1.0 / np.where(total > 0.0, total, 1.0), 0.0)
        ratio = np.where(exp_avg_sq > eps**2, ratio, 0.0)
        inverse = 1.0 / np.maximum(exp_avg_sq, eps**2)  # below, the ratio is 0
        deviation = np.sqrt(of_square.variance) * inverse / 2.0
        worst, linear = _of_inverse_root(of_square.worst * inverse), _of_inverse_root(of_square.linear * inverse)

        def mean(values: np.ndarray) -> np.ndarray:
            return (scale * np.bincount(numbers, ratio * values))[numbers]

        rounding = unit * np.sqrt((sizes + 4) * clipping / 12.0)[numbers]
        random = np.sqrt(scale**2 * np.bincount(numbers, (ratio * deviation) ** 2))[numbers]
        errors.shared += step * (random + rounding)
        errors.worst += step * (mean(worst) + unit * ((sizes + 4) * clipping / 2.0)[numbers])
        errors.linear += step * mean(linear)


def bounds_of(parts: Sequence[Propagation], places: Sequence[np.ndarray]) -> dict[str, Bound]:
    """The bounds on everything after the last update.

    Args:
        parts: propagations of all tensors.
        places: of the elements of each part among those of the case.
    """
    order = np.argsort(np.concatenate(places), kind="stable")
    undecided = sum(part.undecided for part in parts)
    found = {}
    for name in parts[0].errors:
        bound = RoundingErrors.joined([part.errors[name] for part in parts], order).bound()
        found[name] = dataclasses.replace(bound, undecided=undecided) if name == "parameter" else bound
    return found


def _of_inverse_root(relative: np.ndarray) -> np.ndarray:
    """1/sqrt(1-x) - 1: what a relative error x of v does to 1/sqrt(v), at most."""
    return 1.0 / np.sqrt(1.0 - np.minimum(relative, 0.9)) - 1.0
