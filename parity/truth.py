"""The truth of a problem: the float64 reference at the given step counts, and the bounds of every storage.

One run of the reference serves every compensation, state dtype and backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.codings import StateDtypes
from ..core.hyperparameters import Hyperparameters
from ..core.reference import Gradient, Reference
from ..core.rules import Rule
from .bounds import Bound
from .cases import Problem, Storage
from .propagation import FieldErrors, Point, Propagation, bounds_of
from .rules import held_by, settings_of


@dataclasses.dataclass(frozen=True)
class Truth:
    """The reference after `steps` updates.

    values: "parameter" and the rule's fields, debiased; flat float64 arrays over all tensors of the case.
    bounds: for every storage, what each of them may be off by on any device.
    gradual: the same on a device that does not flush subnormal numbers to zero; `bounds` itself where nothing is so small.
    """

    steps: int
    values: Mapping[str, np.ndarray]
    bounds: Mapping[Storage, Mapping[str, Bound]]
    gradual: Mapping[Storage, Mapping[str, Bound]]

    def bounds_of(self, storage: Storage, *, flushes: bool) -> Mapping[str, Bound]:
        """Return the bounds for a device that flushes subnormal numbers to zero, or does not."""
        return (self.bounds if flushes else self.gradual)[storage]


def truths(problem: Problem, storages: Sequence[Storage], step_counts: Sequence[int]) -> dict[int, Truth]:
    """The truth after each of `step_counts` updates.

    The reference is fed with the gradients that backends see, rounded to the problem's dtype, and starts at the
    parameters as that dtype holds them.

    Args:
        problem: rule, hyperparameters, dtype.
        storages: those whose bounds are wanted.
        step_counts: numbers of updates, from 1 on; those that the problem is not run for are left out.
    """
    rule, references = problem.rule, _References(problem)
    now = references.values()
    kinds = [_propagations(problem, storages, flushes=True)]
    if problem.setting.subnormal:
        kinds.append(_propagations(problem, storages, flushes=False))
    places = _places(problem)
    found = {}
    given: Sequence[Hyperparameters] = ()
    step_counts = problem.step_counts(step_counts)
    for step in range(1, max(step_counts, default=0) + 1):
        before, tensors = now, problem.gradients(step)
        previous, given = given, problem.group_hyperparameters(step)
        references.change(given)
        changed = problem.changes_betas and step > 1
        if changed:
            before = references.values()
        references.step(tensors)
        now = references.values()
        for field in rule.fields:  # a step from a field that is not finite is none, also where the field has a sign
            now["parameter"][~np.isfinite(before[field.name])] = np.nan
        gradient, start, end, lost = _finite(rule, problem.flatten(tensors), before, now)
        for group, (place, current) in enumerate(zip(places, given, strict=True)):
            around, after = ({name: array[place] for name, array in values.items()} for values in (start, end))
            earlier = previous[group] if changed else None
            point = Point(step, current, gradient[place], around, after, previous=earlier)
            for kind in kinds:
                for parts in kind.values():
                    parts[group].advance(point)
                    if lost is not None:
                        parts[group].forget(**{kind: where[place] for kind, where in lost.items()})
        if step in step_counts:
            bounds = [{storage: bounds_of(parts, places) for storage, parts in kind.items()} for kind in kinds]
            found[step] = Truth(step, now, bounds[0], bounds[-1])
    return found


def _places(problem: Problem) -> list[np.ndarray]:
    """Of each group the places of its elements in the flat array."""
    setting, numbers = problem.setting, problem.tensor_numbers()
    names = list(setting.shapes)
    return [np.flatnonzero(np.isin(numbers, [names.index(name) for name in group])) for group in setting.groups]


def _propagations(problem: Problem, storages: Sequence[Storage], *, flushes: bool) -> dict[Storage, list[Propagation]]:
    """Of each storage one for every group."""
    fields: dict[tuple[int, StateDtypes], FieldErrors] = {}
    found: dict[Storage, list[Propagation]] = {}
    for storage in storages:
        dtypes = storage.moments(problem)
        for group, place in enumerate(_places(problem)):
            numbers = np.unique(problem.tensor_numbers()[place], return_inverse=True)[1]
            made = Propagation(problem, storage, numbers, fields.get((group, dtypes)), flushes=flushes)
            fields[group, dtypes] = made.fields
            found.setdefault(storage, []).append(made)
    return found


class _References:
    """A reference for each group of tensors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        start = problem.initial_parameters()
        self.given: Sequence[Hyperparameters] = problem.group_hyperparameters()
        self.members = [
            (names, Reference(settings_of(problem.rule, given), {name: start[name] for name in names}))
            for names, given in zip(problem.setting.groups, self.given, strict=True)
        ]

    def change(self, given: Sequence[Hyperparameters]) -> None:
        """Take over the hyperparameters of the next update, by group."""
        self.given = given
        for (_, reference), current in zip(self.members, given, strict=True):
            reference.settings = settings_of(self.problem.rule, current)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """One update of every tensor."""
        with np.errstate(invalid="ignore"):  # infinities and NaN, where the gradients have them
            for names, reference in self.members:
                for name in names:
                    reference.run(Gradient(name, gradients[name]))

    def values(self) -> dict[str, np.ndarray]:
        """The parameters, and the rule's fields as a backend keeps them."""
        held = {
            name: held_by(self.problem.rule, given, tensor)
            for given, (_, reference) in zip(self.given, self.members, strict=True)
            for name, tensor in reference.tensors.items()
        }
        return {
            quantity: self.problem.flatten({name: values[quantity] for name, values in held.items()})
            for quantity in next(iter(held.values()))
        }


def _finite(rule: Rule, gradient: np.ndarray, *values: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """The arrays with zeros where they are not finite, or what enters them is not, and these places of both.

    What is to be NaN has no bound. A field may be finite where its parameter is not (StableAdamW), but not with an L2 term. A
    step by the sign of an infinite gradient (Lion) is one by that of any other: 1 stands for the infinity.
    """
    fields = [array for of in values for name, array in of.items() if name != "parameter" or rule.l2]
    lost = {"fields": ~np.logical_and.reduce([np.isfinite(array) for array in (gradient, *fields)])}
    lost["parameter"] = ~np.logical_and.reduce([np.isfinite(of["parameter"]) for of in values])
    if not (lost["parameter"] | lost["fields"]).any():
        return gradient, *values, None
    kept = [{name: np.where(lost.get(name, lost["fields"]), 0.0, array) for name, array in of.items()} for of in values]
    return np.where(lost["fields"], np.nan_to_num(np.sign(gradient)), gradient), *kept, lost
