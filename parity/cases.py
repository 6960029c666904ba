"""The cases: which rule, stored in which dtypes, is run on which gradients.

A `Problem` is what the reference needs to know: a rule, its hyperparameters, the dtype of parameters and gradients. A
`Storage` is what the reference is free of: compensation and state dtype. A `Case` is one of each; its name, such as
``B/adamw/bfloat16/split/state-float32``, says both.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from ..core.array_ops import numpy_dtype
from ..core.dtypes import LOW_PRECISION, PARAMETER_DTYPES, StateDtypes, compute_dtype, state_dtypes
from ..core.errors import InvalidArgument
from ..core.hyperparameters import Hyperparameters
from ..core.rules import RULES, Rule

STEP_COUNTS = (1, 100, 2000)
QUICK_STEP_COUNTS = (1, 100)

ONE_TENSOR: Mapping[str, tuple[int, ...]] = MappingProxyType({"matrix": (17, 43)})
ODD_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"vector": (509,), "scalar": (), "empty": (0, 5), "one": (1,), "cube": (3, 1, 7)}
)

SEED = 20240229
SPIKE_EVERY = 61  # steps; the gradients are then 30 times their usual size, so that StableAdamW clips


@dataclasses.dataclass(frozen=True)
class Setting:
    """A learning rate, a weight decay, and gradients.

    Args:
        name: the first part of the names of its cases.
        lr: learning rate.
        weight_decay: for every rule; Adam's enters the gradient.
        vanishing_gradient: gradients of about 1e-12 and parameters 1.0, so that only the decay is left; otherwise noisy
            gradients of scales 1e-4 to 1 with spikes, and parameters of magnitude 0.5 to 2.
        odd_shapes: several tensors, 0-d and zero-size among them, for at most 100 steps; otherwise one matrix.
        state_dtypes: also with moments in float32 where the default is lower.
    """

    name: str
    lr: float
    weight_decay: float
    vanishing_gradient: bool = False
    odd_shapes: bool = False
    state_dtypes: bool = True

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of each of its cases."""
        return ODD_SHAPES if self.odd_shapes else ONE_TENSOR

    @property
    def element_count(self) -> int:
        """Over all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


SETTINGS = (
    Setting("A", lr=1e-3, weight_decay=0.01),
    Setting("B", lr=1e-4, weight_decay=0.1),
    Setting("decay", lr=1e-4, weight_decay=0.1, vanishing_gradient=True, state_dtypes=False),
    Setting("shapes", lr=1e-3, weight_decay=0.01, odd_shapes=True, state_dtypes=False),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A rule with its hyperparameters on given gradients: everything that determines the true trajectory."""

    setting: Setting
    rule: Rule
    dtype: str

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The rule's defaults with the setting's learning rate and decay."""
        beta1, beta2 = self.rule.betas
        return Hyperparameters(self.setting.lr, beta1, beta2, self.rule.eps, self.setting.weight_decay)

    def hyperparameters_at(self, step: int) -> dict[str, Hyperparameters]:
        """The hyperparameters of update number `step`, from 1 on, by tensor."""
        return dict.fromkeys(self.setting.shapes, self.hyperparameters)

    @property
    def needs(self) -> frozenset[str]:
        """What a backend must be able to do, in the words of `Backend.abilities`."""
        return frozenset()

    def step_counts(self, asked: Iterable[int]) -> list[int]:
        """Those of the numbers of steps that this problem is run for."""
        return [steps for steps in asked if steps <= 100 or not self.setting.odd_shapes]

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters before the first step, in `dtype`, by tensor."""
        count = self.setting.element_count
        if self.setting.vanishing_gradient:
            flat = np.ones(count)
        else:
            generator = np.random.default_rng(SEED)
            flat = np.exp2(generator.uniform(-1.0, 1.0, count)) * generator.choice([-1.0, 1.0], count)
        return self._split(flat.astype(numpy_dtype(self.dtype)))

    def gradients(self, step: int) -> dict[str, np.ndarray]:
        """The gradients of update number `step`, from 1 on, in `dtype`, by tensor. Every backend gets these bits."""
        count = self.setting.element_count
        return self._split(_gradients(self.setting.vanishing_gradient, count, self.dtype)[step - 1])

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
    """How a case keeps its numbers: a resolved compensation; a state dtype, or None for the default of the parameter's."""

    compensation: str
    state_dtype: str | None

    def moments(self, problem: Problem) -> StateDtypes:
        """The dtypes of exp_avg and exp_avg_sq."""
        return state_dtypes(problem.dtype, problem.rule.betas[1], self.state_dtype, self.state_dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and how its numbers are kept."""

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
        """Whether a quick run has it: every rule, dtype and compensation, but not every combination with the rest.

        Setting A is left out, as its learning rate and decay are those of shapes and its tensor is that of B, and moments
        in full precision are tried without compensation only.
        """
        return self.problem.setting.name != "A" and (self.storage.state_dtype is None or self.storage.compensation == "none")


def storages(dtype: str, state_dtypes: bool) -> tuple[Storage, ...]:
    """Every compensation that is possible for a parameter dtype; with `state_dtypes`, also with full-precision moments."""
    compensations = {"bfloat16": ("none", "kahan", "split"), "float16": ("none", "kahan")}.get(dtype, ("none",))
    states = (None, compute_dtype(dtype)) if state_dtypes and dtype in LOW_PRECISION else (None,)
    return tuple(Storage(compensation, state) for compensation in compensations for state in states)


def all_cases() -> Iterator[Case]:
    """Every case, those of one problem next to each other."""
    for setting in SETTINGS:
        for dtype in PARAMETER_DTYPES:
            for rule in RULES.values():
                problem = Problem(setting, rule, dtype)
                for storage in storages(dtype, setting.state_dtypes):
                    yield Case(problem, storage)


def matches(name: str, pattern: str) -> bool:
    """Whether a case's name matches a shell pattern, or has the pattern as one of its parts."""
    return fnmatch.fnmatchcase(name, pattern) or pattern in name.split("/")


def select(pattern: str | None, *, quick: bool = False) -> list[Case]:
    """The cases whose name matches a shell pattern (``B/*/bfloat16/*``), or has the pattern as one of its parts.

    Args:
        pattern: None: all cases.
        quick: with pattern None, those that are `quick` only.

    Raises:
        InvalidArgument: no case does.
    """
    cases = list(all_cases())
    if pattern is None:
        return [case for case in cases if case.quick or not quick]
    chosen = [case for case in cases if matches(case.name, pattern)]
    if not chosen:
        raise InvalidArgument(
            f"no case matches {pattern!r}; names look like {cases[0].name}, and a pattern like 'B/*/bfloat16/*' or 'adamw'."
        )
    return chosen


@functools.lru_cache(maxsize=2)
def _gradients(vanishing: bool, count: int, dtype: str) -> np.ndarray:
    """All gradients, (steps, elements), rounded to `dtype`."""
    generator = np.random.default_rng(SEED + 1)
    values = generator.standard_normal((max(STEP_COUNTS), count))
    if vanishing:
        return (1e-12 * values).astype(numpy_dtype(dtype))
    values += 0.3  # a drift, so that parameters travel
    values *= np.exp(generator.uniform(np.log(1e-4), 0.0, count))  # the square of 1e-4 is zero in float16
    values[SPIKE_EVERY - 1 :: SPIKE_EVERY] *= 30.0
    return values.astype(numpy_dtype(dtype))
