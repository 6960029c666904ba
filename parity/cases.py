"""The cases: which rule, stored in which dtypes, is run on which gradients.

A `Problem` is what the reference needs to know: a rule, its hyperparameters, the dtype of parameters and gradients. A
`Storage` is what the reference is free of: compensation and state dtype. A `Case` is one of each; its name, such as
``B/adamw/bfloat16/split/state-float32``, says both.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core.codings import StateDtypes, state_dtypes
from ..core.compensation import possible, resolve
from ..core.dtypes import LOW_PRECISION, compute_dtype
from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import Hyperparameters
from ..core.rules import Rule
from .gradients import gradients, parameters
from .rules import FAMILY, RULES, hyperparameters_of
from .settings import QUICK_STEP_COUNTS, SETTINGS, STEP_COUNTS, Setting

__all__ = ["QUICK_STEP_COUNTS", "STEP_COUNTS", "Case", "Problem", "Storage", "all_cases", "matches", "select", "storages"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A rule with its hyperparameters on given gradients: everything that determines the true trajectory."""

    setting: Setting
    rule: Rule
    dtype: str

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The rule's defaults with the setting's learning rate and decay; before any schedule, of tensors in no group."""
        setting = self.setting
        more = {"decouple_lr": True, "max_lr": setting.lr} if setting.decouple_lr else {}
        return hyperparameters_of(self.rule, setting.lr, setting.weight_decay, **more)

    def group_hyperparameters(self, step: int | None = None) -> tuple[Hyperparameters, ...]:
        """The hyperparameters of each of the setting's `groups` at update number `step`, from 1 on; None: before a schedule."""
        usual, group, schedule = self.hyperparameters, self.setting.group, self.setting.schedule
        found = (usual,) if group is None else (usual, group.of(usual))
        if schedule is None or step is None:
            return found
        lr, decay = schedule.learning_rate(step), schedule.weight_decay(step)
        changed = []
        for given in found:
            rates: dict[str, Any] = {"learning_rate": given.learning_rate * lr, "weight_decay": given.weight_decay * decay}
            changed.append(dataclasses.replace(given, **rates | schedule.betas(step, given)))
        return tuple(changed)

    @property
    def changes_betas(self) -> bool:
        """Whether betas differ from step to step."""
        return self.setting.schedule is not None and self.setting.schedule.betas_cycle

    def hyperparameters_at(self, step: int) -> dict[str, Hyperparameters]:
        """The hyperparameters of update number `step`, from 1 on, by tensor."""
        found = zip(self.setting.groups, self.group_hyperparameters(step), strict=True)
        return {name: given for names, given in found for name in names}

    @property
    def needs(self) -> frozenset[str]:
        """The abilities (`Backend.abilities`) that a backend needs for it."""
        setting = self.setting
        needed = {"schedules": setting.schedule, "groups": setting.group, "decoupled decay": setting.decouple_lr}
        needed["changing betas"] = self.changes_betas
        return frozenset(name for name, present in needed.items() if present)

    def step_counts(self, asked: Iterable[int]) -> list[int]:
        """The numbers of steps that this problem is run for: those asked for, cut to its longest run."""
        longest = self.setting.longest if self.rule.name in FAMILY else min(self.setting.longest, LONGEST_OF_OTHERS)
        return sorted({min(steps, longest) for steps in asked})

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters before the first step, in `dtype`, by tensor."""
        return self._split(parameters(self.setting.gradients, self.setting.element_count, self.dtype))

    def gradients(self, step: int) -> dict[str, np.ndarray]:
        """The gradients of update number `step`, from 1 on, in `dtype`, by tensor. Every backend gets these bits."""
        setting = self.setting
        return self._split(gradients(setting.gradients, setting.longest, setting.element_count, self.dtype)[step - 1])

    def flatten(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Tensors of this problem as one flat float64 array."""
        return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in self.setting.shapes])

    def tensor_numbers(self) -> np.ndarray:
        """For every element of the flat array, the number of its tensor."""
        sizes = [math.prod(shape) for shape in self.setting.shapes.values()]
        return np.repeat(np.arange(len(sizes)), sizes)

    def _split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        tensors, start = {}, 0
        for name, shape in self.setting.shapes.items():
            stop = start + math.prod(shape)
            tensors[name] = flat[start:stop].reshape(shape)
            start = stop
        return tensors


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a case stores its numbers: a resolved compensation, and a state dtype or None for the parameter's default."""

    compensation: str
    state_dtype: str | None

    def moments(self, problem: Problem) -> StateDtypes:
        """The dtypes of the rule's fields."""
        rule = problem.rule
        asked = [self.state_dtype] * len(rule.fields)
        return state_dtypes(rule.fields, problem.dtype, rule.decays(problem.hyperparameters), asked)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and the storage of its numbers."""

    problem: Problem
    storage: Storage

    @property
    def name(self) -> str:
        """setting/rule/dtype/compensation/state-dtype, each part spelled as in the optimizers' arguments."""
        problem, storage = self.problem, self.storage
        state = storage.state_dtype or "default"
        return f"{problem.setting.name}/{problem.rule.name}/{problem.dtype}/{storage.compensation}/state-{state}"

    @property
    def quick(self) -> bool:
        """Whether a quick run includes it.

        B and decay try every rule, dtype and compensation, B of StableAdamW full-precision moments without compensation,
        too. The others come with the default compensation, those of several tensors for every rule in float32, and in
        float64 and bfloat16 for StableAdamW only, whose mean is over a tensor; schedules and groups in float32 only, both at
        once. The large tensor comes once. A is left out: its learning rate and decay are those of shapes, its tensor is B's.
        """
        problem, storage = self.problem, self.storage
        setting = problem.setting
        if problem.rule.name not in FAMILY:
            return (
                setting.name == "B"
                and problem.dtype in ("float32", "bfloat16")
                and storage in storages(problem.dtype, "default")
            )
        if setting.name in ("B", "decay"):
            return storage.state_dtype is None or (problem.rule.clips_update and storage.compensation == "none")
        if setting.name in ("A", "groups", "schedule") or storage not in storages(problem.dtype, "default"):
            return False
        if setting.tensors == "matrix" and not problem.needs:
            return True
        if problem.dtype == "float32":
            return problem.rule.clips_update or setting.tensors != "large"
        return problem.rule.clips_update and setting.tensors == "odd shapes" and problem.dtype != "float16"


def storages(dtype: str, kept: str) -> tuple[Storage, ...]:
    """Return the storages of a parameter with this dtype; `kept` is that of `Setting.storages`."""
    if kept == "default":
        return (Storage(resolve("auto", dtype), None),)
    states = (None, compute_dtype(dtype)) if kept == "all" and dtype in LOW_PRECISION else (None,)
    return tuple(Storage(compensation, state) for compensation in possible(dtype) for state in states)


def all_cases() -> Iterator[Case]:
    """Return every case; those of one problem are consecutive."""
    for setting in SETTINGS:
        for dtype in setting.dtypes:
            for rule in RULES.values():
                if is_taken(setting, rule, dtype):
                    problem = Problem(setting, rule, dtype)
                    kept = setting.storages if rule.name in FAMILY else "default"
                    for storage in storages(
                        dtype, "compensations" if kept == "default" and setting.name == EVERY_DTYPE else kept
                    ):
                        yield Case(problem, storage)


LONGEST_OF_OTHERS = 100
"""Steps of a rule that is not of Adam's family."""

EVERY_DTYPE = "B"
"""The setting that such a rule has in every dtype, with every compensation."""


def is_taken(setting: Setting, rule: Rule, dtype: str) -> bool:
    """Whether there are cases of a rule in a setting.

    Adam and its relatives have every one. What does not depend on a rule needs no others to be seen, so that these have B in
    every dtype and all other settings in float32. A rule of whole matrices (Muon) has B in float32 and float64: orthogonalised,
    a momentum in low precision has no digit that is sure.
    """
    if setting.decouple_lr and rule.l2:
        return False
    if rule.name in FAMILY:
        return True
    if rule.of_matrix is not None:
        return setting.name == EVERY_DTYPE and dtype in ("float32", "float64")
    if setting.schedule is not None and setting.schedule.betas_cycle and not any(field.beta for field in rule.fields):
        return False  # nothing is debiased
    return setting.name == EVERY_DTYPE or (dtype == "float32" and setting.name not in ("A", "groups", "schedule", "large"))


def matches(name: str, pattern: str) -> bool:
    """Whether a case's name matches a shell pattern, or has the pattern as one of its parts."""
    return fnmatch.fnmatchcase(name, pattern) or pattern in name.split("/")


def select(pattern: str | None, *, quick: bool = False) -> list[Case]:
    """The cases whose name matches a shell pattern (``B/*/bfloat16/*``), or has the pattern as one of its parts.

    Args:
        pattern: None: all cases.
        quick: with pattern None, those that are `quick` only.

    Raises:
        InvalidArgumentError: no case does.
    """
    cases = list(all_cases())
    if pattern is None:
        return [case for case in cases if case.quick or not quick]
    chosen = [case for case in cases if matches(case.name, pattern)]
    if not chosen:
        raise InvalidArgumentError(
            f"no case matches {pattern!r}; names look like {cases[0].name}, and a pattern like 'B/*/bfloat16/*' or 'adamw'."
        )
    return chosen
