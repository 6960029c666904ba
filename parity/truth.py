"""The truth of a problem: the float64 reference at the given step counts, and the bounds of every storage.

One run of the reference serves every compensation, state dtype and backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.codings import StateDtypes
from ..core.reference import Change, Gradient, Reference, Settings
from ..core.rules.adam_family import AdamHyperparameters
from .bounds import Bound
from .cases import Problem, Storage
from .propagation import Coefficients, MomentErrors, Point, Propagation


@dataclasses.dataclass(frozen=True)
class Truth:
    """The reference after `steps` updates.

    values: "parameter", "exp_avg" and "exp_avg_sq", debiased; flat float64 arrays over all tensors of the case.
    bounds: for every storage, what each of the three may be off by on any device.
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
    rule, group_numbers = problem.rule, _group_numbers(problem)
    reference = _References(problem)
    now = reference.values()
    size = now["parameter"].size
    kinds = [_propagations(problem, storages, size, flushes=True)]
    if problem.setting.subnormal:
        kinds.append(_propagations(problem, storages, size, flushes=False))
    found = {}
    coefficients: Coefficients | None = None
    step_counts = problem.step_counts(step_counts)
    for step in range(1, max(step_counts, default=0) + 1):
        before, tensors, given = now, problem.gradients(step), problem.group_hyperparameters(step)
        reference.change(given)
        previous, coefficients = coefficients, Coefficients.of(given, group_numbers)
        of_moments = None
        if problem.changes_betas and step > 1:
            before, of_moments = reference.values(), previous
        reference.step(tensors)
        now = reference.values()
        gradient = problem.flatten(tensors)
        if rule.l2:
            gradient = gradient + coefficients.decay_rate * before["parameter"]
        gradient, first, first_now, second, second_now = _finite(
            gradient, before["exp_avg"], now["exp_avg"], before["exp_avg_sq"], now["exp_avg_sq"]
        )
        start, end = _finite(before["parameter"], now["parameter"])
        point = Point(step, gradient, first, second, start, first_now, second_now, end, coefficients, of_moments)
        for kind in kinds:
            for propagation in kind.values():
                propagation.advance(point)
        if step in step_counts:
            bounds = [{storage: each.bounds() for storage, each in kind.items()} for kind in kinds]
            found[step] = Truth(step, now, bounds[0], bounds[-1])
    return found


def _propagations(problem: Problem, storages: Sequence[Storage], n: int, *, flushes: bool) -> dict[Storage, Propagation]:
    moments: dict[StateDtypes, MomentErrors] = {}
    found = {}
    for storage in storages:
        dtypes = storage.moments(problem)
        found[storage] = Propagation(problem, storage, n, moments.get(dtypes), flushes=flushes)
        moments[dtypes] = found[storage].moments
    return found


class _References:
    """A reference for each group of tensors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        start = problem.initial_parameters()
        self.members = [
            (names, Reference(_settings(problem, given), {name: start[name] for name in names}))
            for names, given in zip(problem.setting.groups, problem.group_hyperparameters(), strict=True)
        ]

    def change(self, given: Sequence[AdamHyperparameters]) -> None:
        """Take over the hyperparameters of the next update, by group."""
        for (_, reference), current in zip(self.members, given, strict=True):
            rates = {"lr": current.learning_rate, "weight_decay": current.weight_decay}
            reference.run(Change({**rates, "betas": (current.beta1, current.beta2)}))

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """One update of every tensor."""
        with np.errstate(invalid="ignore"):  # infinities and NaN, where the gradients have them
            for names, reference in self.members:
                for name in names:
                    reference.run(Gradient(name, gradients[name]))

    def values(self) -> dict[str, np.ndarray]:
        """The parameters, and the raw moments debiased, as a backend keeps them."""
        parameter, exp_avg, exp_avg_sq = {}, {}, {}
        for _, reference in self.members:
            for name, tensor in reference.tensors.items():
                first, second = (1.0 - beta**tensor.t if tensor.t else 1.0 for beta in reference.settings.betas)
                parameter[name], exp_avg[name], exp_avg_sq[name] = tensor.parameter, tensor.m / first, tensor.v / second
        flatten = self.problem.flatten
        return {"parameter": flatten(parameter), "exp_avg": flatten(exp_avg), "exp_avg_sq": flatten(exp_avg_sq)}


def _settings(problem: Problem, given: AdamHyperparameters) -> Settings:
    return Settings(
        problem.rule.name,
        given.learning_rate,
        (given.beta1, given.beta2),
        given.eps,
        given.weight_decay,
        decouple_lr=given.decouple_lr,
        max_lr=given.max_lr,
    )


def _group_numbers(problem: Problem) -> np.ndarray:
    """For every element of the flat array, the number of its group."""
    setting = problem.setting
    number = {name: index for index, names in enumerate(setting.groups) for name in names}
    return np.array([number[name] for name in setting.shapes])[problem.tensor_numbers()]


def _finite(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays with zeros in all of them where one is not finite: what is to be NaN has no bound."""
    finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
    return arrays if finite.all() else tuple(np.where(finite, array, 0.0) for array in arrays)
