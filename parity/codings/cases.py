"""The cases of the section "codings": a rule, the coding of its parameters and fields, and micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ...core import rules
from ...core.array_ops import numpy_dtype
from ...core.codings import EIGHT_BIT, StateDtypes, random_fields, state_dtypes
from ...core.compensation import WITH_RANDOM_BITS, compensation_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule
from ..cases import Storage
from ..rules import hyperparameters_of
from .protocol import HeldField, HeldTensor

SEED = 20240317
TENSOR = "matrix"
"""The name of the only one of each case, of 130 columns: its rows end in a short block."""

UPDATES = 3
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1


@dataclasses.dataclass(frozen=True)
class CodingCase:
    """A rule with the storage of its numbers.

    storage: a resolved compensation, and the dtype that is asked for all fields, or "8bit".
    micro_batches: of each update, put into the fields one by one (accumulation="state") where there are several.
    rows: of the matrix.
    quick: whether a quick run includes it.
    """

    rule: Rule
    dtype: str
    storage: Storage
    micro_batches: int = 1
    rows: int = 40
    quick: bool = False

    @property
    def name(self) -> str:
        """codings/rule/dtype/compensation/state-dtype, and how micro-batches are accumulated."""
        parts = ["codings", self.rule.name, self.dtype, self.storage.compensation, f"state-{self.storage.state_dtype}"]
        return "/".join([*parts, *(["in-state"] if self.micro_batches > 1 else [])])

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The rule's defaults, with the section's learning rate and decay."""
        return hyperparameters_of(self.rule, LEARNING_RATE, WEIGHT_DECAY, **_MORE.get(self.rule.name, {}))

    @property
    def field_dtypes(self) -> StateDtypes:
        """The dtypes of the rule's fields."""
        asked = [self.storage.state_dtype] * len(self.rule.fields)
        return state_dtypes(self.rule.fields, self.dtype, self.rule.decays(self.hyperparameters), asked)

    @property
    def random(self) -> tuple[int, ...]:
        """The numbers of what is rounded by chance: 0 for the parameter, n for the nth field."""
        found = random_fields(self.rule.fields, self.field_dtypes, self.rule.decays(self.hyperparameters))
        return (*((0,) if self.storage.compensation in WITH_RANDOM_BITS else ()), *found)

    @property
    def states(self) -> str:
        """How the fields are stored: a value of that axis of `core.combinations`."""
        return "8bit" if EIGHT_BIT in self.field_dtypes else "stochastic" if any(self.random) else "plain"

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters before the first update."""
        return {TENSOR: np.random.default_rng(SEED).standard_normal(self._shape).astype(numpy_dtype(self.dtype))}

    def initial(self) -> dict[str, HeldTensor]:
        """What is stored before the first update: the parameters, and zeros."""
        found, kept = {}, compensation_dtype(self.storage.compensation, self.dtype)
        for name, parameter in self.initial_parameters().items():
            zeros = {
                field.name: HeldField(np.zeros(parameter.shape, "float32" if dtype == EIGHT_BIT else numpy_dtype(dtype)))
                for field, dtype in zip(self.rule.fields, self.field_dtypes, strict=True)
            }
            compensation = None if kept is None else np.zeros(parameter.shape, numpy_dtype(kept))
            found[name] = HeldTensor(parameter, compensation, zeros)
        return found

    def gradients(self, update: int) -> list[dict[str, np.ndarray]]:
        """The gradients of an update, from 1 on, by micro-batch; every backend gets these bits.

        Each element has a magnitude of its own, between 1e-5 and 1, so that squares have all codes.
        """
        scales = 10.0 ** np.random.default_rng(SEED).uniform(-5.0, 0.0, self._shape)
        noise = np.random.default_rng([SEED, update]).standard_normal((self.micro_batches, *self._shape))
        return [{TENSOR: each.astype(numpy_dtype(self.dtype))} for each in scales * noise]

    @property
    def _shape(self) -> tuple[int, int]:
        return self.rows, 130


_MORE: dict[str, dict[str, Any]] = {"ranger": {"k": 2}}
"""Settings that show within `UPDATES`."""

_case = functools.partial(CodingCase, rules.ADAMW, "bfloat16")

CASES = (
    _case(Storage("split8", "8bit"), quick=True),
    _case(Storage("stochastic", "bfloat16"), quick=True),
    _case(Storage("stochastic", "8bit"), micro_batches=2, quick=True),
    _case(Storage("kahan", "8bit")),
    _case(Storage("split", "bfloat16")),
    _case(Storage("none", "8bit")),
    CodingCase(rules.ADAMW, "float32", Storage("none", "8bit")),
    CodingCase(rules.ADAMW, "float32", Storage("none", "bfloat16"), micro_batches=4),
    CodingCase(rules.ADAMW, "float16", Storage("stochastic", "float32")),
    CodingCase(rules.ADAM, "bfloat16", Storage("stochastic", "8bit")),
    CodingCase(rules.LION, "bfloat16", Storage("stochastic", "8bit"), rows=520),  # more than 2^16 elements
    CodingCase(rules.RULES["sgd_momentum"], "bfloat16", Storage("split8", "8bit"), micro_batches=2),
    CodingCase(rules.RULES["sgd_nesterov"], "bfloat16", Storage("split8", "8bit")),
    CodingCase(rules.RANGER, "bfloat16", Storage("stochastic", "8bit")),
    CodingCase(rules.MUON, "bfloat16", Storage("stochastic", "8bit")),
    CodingCase(rules.RULES["muon_momentum"], "float32", Storage("none", "8bit"), micro_batches=2),
)
"""Every compensation with fields of every kind. Another case is another row."""
