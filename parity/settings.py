"""The settings: tensors, hyperparameters and gradients on which the rules are run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..core.dtypes import PARAMETER_DTYPES
from ..core.hyperparameters import Hyperparameters
from .rules import decays_of

STEP_COUNTS = (1, 100, 2000)
QUICK_STEP_COUNTS = (1, 100)

BETAS_PERIOD = 20

TENSORS: Mapping[str, Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "matrix": {"matrix": (17, 43)},
        "weight and bias": {"weight": (17, 23), "bias": (23,)},
        "odd shapes": {"vector": (509,), "scalar": (), "empty": (0, 5), "one": (1,), "cube": (3, 1, 7)},
        "large": {"large": (1009, 997)},
    }
)
"""Sets of tensors, by name: shapes by the name of the tensor. The large one has as many elements as a real layer."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning rate that warms up and then follows a cosine, a weight decay that rises, and betas that cycle; by step.

    lr          a factor: step/warm_up up to warm_up steps, then from 1 to `lowest` at `period` along half a cosine
    decay       a factor: from 1/2 to 1 at `period` along half a cosine, if `decay_rises`; else 1
    betas       1-beta1 times 1/2 to 4 and 1 less the others times 1 to 2 along a cosine of `BETAS_PERIOD` steps, if
                `betas_cycle`; rounded to float32, in which JAX has them
    """

    warm_up: int = 10
    period: int = 100
    lowest: float = 0.1
    decay_rises: bool = False
    betas_cycle: bool = False

    def learning_rate(self, step: int) -> float:
        """The factor of update number `step`, from 1 on."""
        if step <= self.warm_up:
            return step / self.warm_up
        progress = min(1.0, (step - self.warm_up) / (self.period - self.warm_up))
        return self.lowest + (1.0 - self.lowest) * (1.0 + math.cos(math.pi * progress)) / 2.0

    def weight_decay(self, step: int) -> float:
        """The factor of update number `step`, from 1 on."""
        if not self.decay_rises:
            return 1.0
        return 0.75 - math.cos(math.pi * min(1.0, step / self.period)) / 4.0

    def betas(self, step: int, given: Hyperparameters) -> dict[str, float]:
        """The decays of update number `step`, from 1 on, by name."""
        decays = decays_of(given)
        if not self.betas_cycle:
            return decays
        up = (1.0 - math.cos(2.0 * math.pi * step / BETAS_PERIOD)) / 2.0
        factors = [1.0 + up if number else 0.5 + 3.5 * up for number in range(len(decays))]
        return {name: _slower(decay, by) for (name, decay), by in zip(decays.items(), factors, strict=True)}


def _slower(decay: float, factor: float) -> float:
    """The decay whose distance from 1 is multiplied by a factor, rounded to float32."""
    return float(np.float32(1.0 - factor * (1.0 - decay)))


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of tensors whose hyperparameters differ from the setting's.

    Args:
        tensors: names; those in no group keep the setting's.
        lr, weight_decay: factors.
        decay_factors: by which 1-beta1 and 1 less all other decays are multiplied. 1-beta2 stays on its side of 2^-7, where the
            default dtype of a bfloat16 parameter's second moment changes.
    """

    tensors: tuple[str, ...]
    lr: float
    weight_decay: float
    decay_factors: tuple[float, float]

    def of(self, given: Hyperparameters) -> Hyperparameters:
        """The group's hyperparameters, from those of the setting."""
        first, others = self.decay_factors
        changed: dict[str, Any] = {
            name: 1.0 - (others if number else first) * (1.0 - decay)
            for number, (name, decay) in enumerate(decays_of(given).items())
        }
        return dataclasses.replace(
            given,
            learning_rate=given.learning_rate * self.lr,
            weight_decay=given.weight_decay * self.weight_decay,
            max_lr=None if given.max_lr is None else given.max_lr * self.lr,
            **changed,
        )


@dataclasses.dataclass(frozen=True)
class Setting:
    """A learning rate, a weight decay, tensors, and gradients.

    Args:
        name: the first part of the names of its cases.
        lr: learning rate; under a schedule, the highest.
        weight_decay: for every rule; Adam's enters the gradient.
        tensors: which of `TENSORS`.
        gradients: which of `parity.gradients.KINDS`.
        longest: the highest number of steps; those who ask for more get this one.
        storages: "all"; "compensations": not also with float32 moments where the default is lower; or "default": with the
            default compensation only.
        dtypes: of parameters and gradients.
        schedule, group: None: the hyperparameters are the same for all steps, for all tensors.
        decouple_lr: fully decoupled decay, with the setting's `lr` as max_lr. Rules with an L2 term are left out.
    """

    name: str
    lr: float
    weight_decay: float
    tensors: str = "matrix"
    gradients: str = "noise"
    longest: int = STEP_COUNTS[-1]
    storages: str = "all"
    dtypes: tuple[str, ...] = PARAMETER_DTYPES
    schedule: Schedule | None = None
    group: Group | None = None
    decouple_lr: bool = False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of each of its cases."""
        return TENSORS[self.tensors]

    @property
    def subnormal(self) -> bool:
        """Whether its gradients or their squares are below the smallest normal number, which some devices flush to zero."""
        return self.gradients == "denormal"

    @property
    def element_count(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of its tensors, by group of equal hyperparameters; one group has all of them where none is special."""
        special = () if self.group is None else self.group.tensors
        usual = tuple(name for name in self.shapes if name not in special)
        return (usual, special) if special else (usual,)


_WARM_UP_AND_COSINE = Schedule()
_DECAY_TOO = Schedule(decay_rises=True)
_BIASES = Group(("bias",), lr=10.0, weight_decay=0.0, decay_factors=(0.5, 2.0))

_like_b = functools.partial(Setting, lr=1e-4, weight_decay=0.1, longest=100, storages="compensations")
"""The hyperparameters and tensors of B, whose compiled programs serve these, too."""

_like_shapes = functools.partial(
    Setting, lr=1e-3, weight_decay=0.01, tensors="odd shapes", longest=100, storages="compensations"
)
_changing = functools.partial(Setting, lr=1e-3, longest=100, storages="default")
"""Hyperparameters that differ from step to step, or from tensor to tensor."""

_ONE_OF_TWO = ("float32", "bfloat16")
"""Dtypes of a setting that has schedules or groups; "schedules" has both, in every dtype."""

_OF_ANY_BETA2 = ("float64", "float32", "float16")
"""Dtypes whose second moment has the same dtype for every beta2, also for one that JAX cannot know beforehand."""

SETTINGS = (
    Setting("A", lr=1e-3, weight_decay=0.01, storages="default"),
    Setting("B", lr=1e-4, weight_decay=0.1),
    Setting("decay", lr=1e-4, weight_decay=0.1, gradients="vanishing", storages="compensations"),
    _like_b("constant", gradients="constant"),
    _like_b("denormal", gradients="denormal", dtypes=("float32", "bfloat16", "float16")),
    _like_b("huge", gradients="huge"),
    _like_shapes("shapes"),
    _like_shapes("nonfinite", gradients="nonfinite"),
    _changing("groups", weight_decay=0.01, tensors="weight and bias", dtypes=_ONE_OF_TWO, group=_BIASES),
    _changing("schedule", weight_decay=0.01, dtypes=_ONE_OF_TWO, schedule=_WARM_UP_AND_COSINE),
    _changing("schedules", weight_decay=0.1, tensors="weight and bias", schedule=_DECAY_TOO, group=_BIASES),
    _changing("betas", weight_decay=0.01, dtypes=_OF_ANY_BETA2, schedule=Schedule(betas_cycle=True)),
    _changing(
        "decoupled",
        weight_decay=5e-4,
        tensors="weight and bias",
        schedule=_WARM_UP_AND_COSINE,
        group=_BIASES,
        decouple_lr=True,
    ),
    Setting(
        "large",
        lr=1e-3,
        weight_decay=0.01,
        tensors="large",
        gradients="spiked",
        longest=3,
        storages="default",
        dtypes=("float32", "bfloat16"),
    ),
)


def named(name: str) -> Setting:
    """The setting of `SETTINGS` that has this name."""
    (found,) = (setting for setting in SETTINGS if setting.name == name)
    return found
