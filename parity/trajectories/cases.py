"""The trajectories: the way of training, the rule and the dtype. Model, text and initial parameters are the same for all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule
from ...demonstration.initialisation import Parameters, initial_parameters
from ...demonstration.settings import ModelShape
from ...demonstration.text import Batches
from ..rules import FAMILY, hyperparameters_of

MODES = {
    "step": "a backward pass, then the update of all parameters",
    "release": "every parameter is updated when its gradient exists",
    "hold": "four micro-batches, exact",
    "clip": "the global norm clipped, exact",
    "state": "two micro-batches, into the moments",
}
"""The first part of a case's name, and its meaning."""

SHAPE = ModelShape(vocabulary=32, width=32, layers=2, heads=4, context=16)
BATCH_SIZE = 8
MICROBATCHES = {"hold": 4, "state": 2}
MAX_NORM = 1.5  # of gradients whose norms go from 1.9 down to 1.2
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
SEED = 6

TERMS = max(BATCH_SIZE * SHAPE.context, 4 * SHAPE.width, SHAPE.vocabulary)
"""The longest sum in the model, forward and backward."""

STEP_COUNTS = (1, 20, 50)
FEW = (1, 20)
"""Of quick runs, and of the modes "clip" and "state", whose references are those of no other mode."""

QUICK = ("step/adamw/float64", "release/adam/float32", "hold/adam/float64", "clip/stable_adamw/float32")
"""What a quick run has: every mode that is exact, every rule, both dtypes."""

PROGRAMS = (
    *(f"{mode}/{part}" for mode in ("step", "release") for part in ("stable_adamw/float32", "adamw/float64")),
    *("hold/adam/float32", "clip/stable_adamw/float32", "state/stable_adamw/float32"),
)
"""What is run by a backend that compiles a program a case, which takes three to five seconds."""

QUICK_PROGRAMS = {"clip/stable_adamw/float32": "jax"}
"""What of it a quick run has, and for which backend."""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One training run.

    Args:
        mode: one of `MODES`.
        rule: with its default betas and eps, and the constants of this module.
        dtype: of parameters, states and arithmetic: "float64" or "float32". Both start from numbers that float32 holds, so
            that they have one truth.
        quick: as a quick run has it, with fewer steps.
    """

    mode: str
    rule: Rule
    dtype: str
    quick: bool = False

    @property
    def name(self) -> str:
        """trajectories/mode/rule/dtype."""
        return f"trajectories/{self._part}"

    @property
    def step_counts(self) -> tuple[int, ...]:
        """The numbers of updates after which it is compared."""
        return FEW if self.quick or self.mode in ("clip", "state") else STEP_COUNTS

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The rule's defaults with this module's learning rate and decay."""
        return hyperparameters_of(self.rule, LEARNING_RATE, WEIGHT_DECAY)

    @property
    def microbatches(self) -> int:
        """Into how many equal parts each batch is cut."""
        return MICROBATCHES.get(self.mode, 1)

    def parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """The micro-batches of a batch: rows 0, n, 2n, ... make the first of n, as the JAX frontend cuts it."""
        return [batch[number :: self.microbatches] for number in range(self.microbatches)]

    @property
    def max_norm(self) -> float | None:
        """Of the gradient, or None."""
        return MAX_NORM if self.mode == "clip" else None

    def program_skipped(self, backend: str) -> str | None:
        """Why a backend that compiles a program a case leaves this one out (a sentence), or None."""
        if self.quick and QUICK_PROGRAMS.get(self._part) != backend:
            return "compiling takes seconds a case; leave out --quick"
        if not self.quick and self._part not in PROGRAMS:
            return "compiling takes seconds a case; each mode is compiled for some rules and dtypes, not for these"
        return None

    @property
    def _part(self) -> str:
        return f"{self.mode}/{self.rule.name}/{self.dtype}"


def trajectories(*, quick: bool) -> Sequence[Trajectory]:
    """All cases, or those of a quick run. Those that share a truth stand next to each other."""
    cases = [
        Trajectory(mode, rule, dtype, quick)
        for modes in (("step", "release", "hold"), ("clip",), ("state",))
        for rule in FAMILY.values()
        for mode in modes
        for dtype in ("float64", "float32")
    ]
    return [case for case in cases if not quick or case._part in QUICK]


@functools.cache
def _start() -> Parameters:
    return initial_parameters(SHAPE, seed=SEED, dtype="float32")


def start(dtype: str) -> Parameters:
    """The parameters before the first step, by name: float32 numbers, as arrays of `dtype`."""
    return {name: value.astype(dtype) for name, value in _start().items()}


@functools.cache
def batches() -> Batches:
    """The batches: sequences of a text in which each token is near the one before, so that there is something to learn."""
    steps = np.random.default_rng(SEED).integers(-2, 3, 5000)
    text = (np.cumsum(steps) % SHAPE.vocabulary).astype(np.uint8)
    return Batches(text, batch_size=BATCH_SIZE, context=SHAPE.context, seed=SEED)


def tensor_numbers() -> np.ndarray:
    """For every element of the flat array of all parameters, the number of its tensor."""
    sizes = [value.size for value in _start().values()]
    return np.repeat(np.arange(len(sizes)), sizes)


def flatten(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Arrays by name of the parameter as one flat float64 array."""
    return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in _start()])
