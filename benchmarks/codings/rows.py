"""What is trained: the codings by name, and the settings that all of them share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from penstock.demonstration.initialisation import Parameters, initial_parameters
from penstock.demonstration.settings import ModelShape
from penstock.demonstration.text import Batches, read_text

LAST = 50
"""Steps whose mean loss is compared: the last ones."""

LIMIT = 0.003
"""How far a coding's mean over all seeds may be from the float32 runs', in nats."""


class Row(NamedTuple):
    """A coding, and who trains with it.

    optimizer: its name in the torch frontend; JAX's is the same in lower case. dtype: of the parameters. asked: arguments of
    the optimizer: compensation, precision, or state_dtype, which are mu_dtype and nu_dtype in JAX. base: the row in float32
    with which it is compared; None: it is one. loses: whether the loss is to differ, to show that the comparison can tell.
    """

    optimizer: str
    dtype: str = "bfloat16"
    asked: Mapping[str, Any] = MappingProxyType({})
    base: str | None = "float32"
    loses: bool = False


ROWS = {
    "float32": Row("AdamW", "float32", base=None),
    "float32, bfloat16 states": Row("AdamW", "float32", {"state_dtype": "bfloat16"}),
    "float32, 8-bit states": Row("AdamW", "float32", {"state_dtype": "8bit"}),
    "kahan": Row("AdamW", asked={"compensation": "kahan"}),
    "split (exact)": Row("AdamW", asked={"precision": "exact"}),
    "split, bfloat16 states": Row("AdamW", asked={"compensation": "split", "state_dtype": "bfloat16"}),
    "split8": Row("AdamW", asked={"compensation": "split8"}),
    "split8, 8-bit states (compact)": Row("AdamW", asked={"precision": "compact"}),
    "stochastic": Row("AdamW", asked={"compensation": "stochastic"}),
    "stochastic, 8-bit states (smallest)": Row("AdamW", asked={"precision": "smallest"}),
    "no compensation": Row("AdamW", asked={"compensation": "none"}, loses=True),
    "Lion, float32": Row("Lion", "float32", base=None),
    "Lion, smallest": Row("Lion", asked={"precision": "smallest"}, base="Lion, float32"),
    "Lion, 8-bit momentum": Row("Lion", "float32", {"state_dtype": "8bit"}, base="Lion, float32"),
    "Muon, float32": Row("Muon", "float32", base=None),
    "Muon, 8-bit momentum": Row("Muon", "float32", {"state_dtype": "8bit"}, base="Muon, float32"),
}
"""By name; of bfloat16 parameters and AdamW where the name does not say otherwise. Another coding is another row."""

LR = {"AdamW": 2e-3, "Lion": 6e-4, "Muon": 2e-3}
"""The highest learning rate; Lion's is the best of its float32 run."""

SMALL = ModelShape(width=128, layers=2, heads=4, context=32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all rows share: the model, batches of `batch` sequences, and the schedule of the learning rate."""

    steps: int = 400
    batch: int = 8
    weight_decay: float = 0.01
    warm_up: int = 20
    shape: ModelShape = SMALL

    def learning_rate(self, row: Row, step: int) -> float:
        """The rate of update 0, 1, ...: it rises linearly, and then follows half a cosine down to 0."""
        rise, progress = min(1.0, (step + 1) / self.warm_up), (step + 1) / self.steps
        return LR[row.optimizer] * rise * (1.0 + math.cos(math.pi * progress)) / 2.0

    def initial(self, seed: int) -> Parameters:
        """The initial parameters, float32."""
        return initial_parameters(self.shape, seed=seed, dtype="float32")

    def batches(self, seed: int) -> list[np.ndarray]:
        """What every row learns from, one array a step."""
        text = read_text(None, at_least=self.shape.context + 1)
        batches = Batches(text, batch_size=self.batch, context=self.shape.context, seed=seed)
        return [batches.batch(step) for step in range(self.steps)]


QUICK = Settings(steps=4, batch=2, shape=ModelShape(width=32, layers=1, heads=2, context=16))
