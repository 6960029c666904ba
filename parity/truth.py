"""The truth of a problem: the float64 reference at the step counts asked for, and the bounds of every storage.

One run of the reference serves every compensation, state dtype and backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.dtypes import StateDtypes
from ..core.reference import Gradient, Reference, Settings
from .bounds import Bound
from .cases import Problem, Storage
from .propagation import MomentErrors, Point, Propagation


@dataclasses.dataclass(frozen=True)
class Truth:
    """The reference after `steps` updates.

    values: "parameter", "exp_avg" and "exp_avg_sq", debiased; flat float64 arrays over all tensors of the case.
    bounds: for every storage, what each of the three may be off by.
    """

    steps: int
    values: Mapping[str, np.ndarray]
    bounds: Mapping[Storage, Mapping[str, Bound]]


def truths(problem: Problem, storages: Sequence[Storage], step_counts: Sequence[int]) -> dict[int, Truth]:
    """The truth after each of `step_counts` updates.

    The reference is fed with the gradients that backends see, rounded to the problem's dtype, and starts at the
    parameters as that dtype holds them.

    Args:
        problem: rule, hyperparameters, dtype.
        storages: those whose bounds are wanted.
        step_counts: numbers of updates, from 1 on; those that the problem is not run for are left out.
    """
    setting, rule = problem.setting, problem.rule
    reference = Reference(
        Settings(rule.name, setting.lr, rule.betas, rule.eps, setting.weight_decay), problem.initial_parameters()
    )
    now = _values(reference, problem)
    moments: dict[StateDtypes, MomentErrors] = {}
    propagations = {}
    for storage in storages:
        dtypes = storage.moments(problem)
        propagations[storage] = Propagation(problem, storage, now["parameter"].size, moments.get(dtypes))
        moments[dtypes] = propagations[storage].moments
    found = {}
    step_counts = problem.step_counts(step_counts)
    for step in range(1, max(step_counts, default=0) + 1):
        before, tensors = now, problem.gradients(step)
        for name, value in tensors.items():
            reference.run(Gradient(name, value))
        now = _values(reference, problem)
        gradient = problem.flatten(tensors)
        if rule.l2:
            gradient = gradient + setting.weight_decay * before["parameter"]
        point = Point(
            step,
            gradient,
            before["exp_avg"],
            before["exp_avg_sq"],
            before["parameter"],
            now["exp_avg"],
            now["exp_avg_sq"],
            now["parameter"],
        )
        for propagation in propagations.values():
            propagation.advance(point)
        if step in step_counts:
            bounds = {storage: propagation.bounds() for storage, propagation in propagations.items()}
            found[step] = Truth(step, now, bounds)
    return found


def _values(reference: Reference, problem: Problem) -> dict[str, np.ndarray]:
    """The reference's parameters, and its raw moments debiased, as a backend keeps them."""
    tensors = reference.tensors
    step = next(iter(tensors.values())).t
    first, second = (1.0 - beta**step if step else 1.0 for beta in problem.rule.betas)
    return {
        "parameter": problem.flatten({name: tensor.parameter for name, tensor in tensors.items()}),
        "exp_avg": problem.flatten({name: tensor.m for name, tensor in tensors.items()}) / first,
        "exp_avg_sq": problem.flatten({name: tensor.v for name, tensor in tensors.items()}) / second,
    }
