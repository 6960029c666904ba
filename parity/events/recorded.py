"""The events of a training loop as data: events, sequences, and cases."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from ...core.array_ops import numpy_dtype
from ...core.codings import StateDtypes
from ...core.compensation import resolve
from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule
from ..cases import Problem, Storage
from ..rules import hyperparameters_of
from ..settings import Setting

SEED = 20240229
SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType({"matrix": (5, 3), "vector": (7,), "scalar": ()})
"""The tensors of every case."""

ALL = tuple(SHAPES)
TIED = "matrix"
"""The tensor that a sequence with tied weights uses twice."""

LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1


@dataclasses.dataclass(frozen=True)
class Backward:
    """A backward pass: the gradients of one micro-batch come.

    tensors: those that the loss uses; the others get no gradient.
    factor: of the gradients, so that they are clipped, or not.
    nonfinite: tensors of whose gradient one element is an infinity.
    paused: the gradients are to stay in `.grad`.
    last: no other micro-batch of this step follows; looked at where the sequence has `last_known`.
    """

    tensors: tuple[str, ...] = ALL
    factor: float = 1.0
    nonfinite: tuple[str, ...] = ()
    paused: bool = False
    last: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """optimizer.step() followed by zero_grad()."""


@dataclasses.dataclass(frozen=True)
class Discard:
    """zero_grad() without a step() before it."""


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """A scheduler's new learning rate, for the steps that follow."""

    value: float


Event = Backward | Step | Discard | LearningRate


@dataclasses.dataclass(frozen=True)
class EventSequence:
    """A training loop, and the way its gradients are used.

    accumulation: of the micro-batches of a step: None (one backward a step), "hold" or "state".
    last_known: which micro-batch is the last is known when it comes; otherwise step() does what waits.
    max_norm: the global norm is clipped to this. clips_each: instead, the norm of each tensor's gradient.
    loss_scale: the loss is multiplied by this power of two, and a step whose gradient is not finite is skipped whole.
    skips: gradients that are not finite are not used: under release one by one, of waiting ones all or none.
    tied: the loss uses `TIED` twice.
    compiled_for: rule and dtype of the case that backends run which compile; `updates` has them run all of them.
    """

    name: str
    events: tuple[Event, ...]
    accumulation: str | None = None
    last_known: bool = False
    max_norm: float | None = None
    clips_each: bool = False
    loss_scale: float | None = None
    skips: bool = False
    tied: bool = False
    compiled_for: tuple[str, str] = ("stable_adamw", "bfloat16")

    @property
    def measures(self) -> bool:
        """Whether something must be known of the whole gradient before a part of it is used."""
        return (self.max_norm is not None and not self.clips_each) or self.loss_scale is not None

    @property
    def steps(self) -> int:
        """Number of calls of step()."""
        return sum(isinstance(event, Step) for event in self.events)

    def groups(self) -> Iterator[tuple[float, list[tuple[int, Backward]], bool]]:
        """What is between boundaries: the learning rate, the passes with their numbers, whether a step() ends it."""
        rate, passes, number = LEARNING_RATE, [], 0
        for event in self.events:
            if isinstance(event, LearningRate):
                rate = event.value
            elif isinstance(event, Backward):
                passes.append((number, event))
                number += 1
            else:
                yield rate, passes, isinstance(event, Step)
                passes = []

    def is_last(self, event: Backward) -> bool:
        """Whether a gradient of this pass is known to close its tensor's micro-batches when it comes."""
        return not event.paused and (self.accumulation is None or (self.last_known and event.last))


@dataclasses.dataclass(frozen=True)
class EventCase:
    """A sequence for one rule and dtype, with the default compensation and state dtypes."""

    sequence: EventSequence
    rule: Rule
    dtype: str

    @property
    def name(self) -> str:
        """events/sequence/rule/dtype."""
        return f"events/{self.sequence.name}/{self.rule.name}/{self.dtype}"

    @property
    def not_compiled(self) -> str | None:
        """Why backends that compile a program for each rule and dtype do not run it (a sentence), or None when they do."""
        if (self.rule.name, self.dtype) == self.sequence.compiled_for:
            return None
        return "compiling takes seconds a case; each sequence is compiled for one rule and dtype"

    @property
    def storage(self) -> Storage:
        """The storage of its numbers."""
        return Storage(resolve("auto", self.dtype), None)

    @property
    def moments(self) -> StateDtypes:
        """The dtypes of the rule's fields."""
        return self.storage.moments(self.problem())

    def hyperparameters(self, learning_rate: float = LEARNING_RATE) -> Hyperparameters:
        """The rule's defaults with the sequences' weight decay."""
        return hyperparameters_of(self.rule, learning_rate, WEIGHT_DECAY)

    def problem(self, tensors: tuple[str, ...] = ALL) -> Problem:
        """Some of the tensors as a problem of the suite."""
        setting = OfTensors("events", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, names=tensors)
        return Problem(setting, self.rule, self.dtype)

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters before the first event, in `dtype`, of magnitude 0.5 to 2."""
        generator = np.random.default_rng(SEED)
        found = {}
        for name, shape in SHAPES.items():
            values = np.exp2(generator.uniform(-1.0, 1.0, shape)) * generator.choice([-1.0, 1.0], shape)
            found[name] = np.asarray(values).astype(numpy_dtype(self.dtype))
        return found

    def gradients(self, number: int, event: Backward) -> dict[str, list[np.ndarray]]:
        """The gradients of pass `number` (from 0 on), in `dtype`, by tensor; one for each use that the loss makes of it.

        Every backend gets these bits. They are noisy, with a drift, of magnitudes 0.01 to 1 times the event's factor.
        """
        generator = np.random.default_rng([SEED, number])
        found = {}
        for name, shape in SHAPES.items():
            uses = []
            for _ in range(2):  # drawn always, so that no gradient depends on what else there is
                scales = np.exp(generator.uniform(math.log(0.01), 0.0, shape))
                values = np.asarray(event.factor * scales * (generator.standard_normal(shape) + 0.3))
                uses.append(values.astype(numpy_dtype(self.dtype)))
            if name in event.nonfinite:
                uses[0].reshape(-1)[-1] = np.inf
            if name in event.tensors:
                found[name] = uses if self.sequence.tied and name == TIED else uses[:1]
        return found


@dataclasses.dataclass(frozen=True)
class OfTensors(Setting):
    """A setting of some of `SHAPES`."""

    names: tuple[str, ...] = ALL

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: SHAPES[name] for name in self.names}
