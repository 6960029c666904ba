"""A run that changes the framework half-way, and its laws.

there       every array that arrives is the one that left, bit for bit
file        what the other framework writes of it at once is the same file, byte for byte
back        and leads back to the same arrays
on          the run that goes on in the other framework meets the bounds of one that never changed
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ..backends.protocol import Held
from ..cases import Case
from .sides import JaxSide, Side, TorchSide

Sides = Mapping[str, Callable[[Case], Side]]
"""What makes each end of a route, by name."""

SIDES: Sides = MappingProxyType(
    {
        "torch": TorchSide,
        "release": lambda case: TorchSide(case, released=True),
        "jax": JaxSide,
        "walk": lambda case: JaxSide(case, stacked=True),
    }
)

BACKENDS = MappingProxyType({"torch": "eager", "release": "eager", "jax": "jax", "walk": "walk"})
"""The backend of the suite that each side is a run of."""

PLAIN_ROUTES = (("torch", "jax"), ("jax", "torch"))
ROUTES = (*PLAIN_ROUTES, ("release", "walk"), ("walk", "release"))
HALF = 50
"""Steps on each side."""


@dataclasses.dataclass(frozen=True)
class ConversionCase:
    """A route, and what is run on it."""

    route: tuple[str, str]
    case: Case

    @property
    def name(self) -> str:
        """conversion/from-to/rule/dtype/compensation."""
        problem, storage = self.case.problem, self.case.storage
        return f"conversion/{'-'.join(self.route)}/{problem.rule.name}/{problem.dtype}/{storage.compensation}"


@dataclasses.dataclass(frozen=True)
class Promise:
    """Two arrays of one shape and dtype that must be equal in every bit."""

    quantity: str
    one: np.ndarray
    other: np.ndarray


def run_route(conversion: ConversionCase, sides: Sides = SIDES) -> tuple[list[Promise], Mapping[str, Held]]:
    """Run a route once: `HALF` steps, the change of framework, `HALF` steps.

    Returns:
        What must be equal after the first half; what the tensors of the case are at the end.
    """
    case, (start, end) = conversion.case, conversion.route
    before, after, back = sides[start](case), sides[end](case), sides[start](case)
    for step in range(1, HALF + 1):
        before.step(case.problem.gradients(step))
    after.step(case.problem.gradients(1))  # what it has learnt itself must go
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("one", "other")]
        before.save(files[0])
        after.load(files[0])
        after.save(files[1])
        back.load(files[1])
        one, other = (np.frombuffer(file.read_bytes(), np.uint8) for file in files)
    size = max(one.size, other.size)
    padded = [np.pad(each.astype(np.int16), (0, size - each.size), constant_values=-1) for each in (one, other)]
    promises = [
        *_equal("there", after.held(), before.held()),
        Promise("file", padded[1], padded[0]),
        *_equal("back", back.held(), before.held()),
    ]
    for step in range(HALF + 1, 2 * HALF + 1):
        after.step(case.problem.gradients(step))
    return promises, {name.removeprefix("0."): held for name, held in after.held().items() if name.startswith("0.")}


def _equal(law: str, one: Mapping[str, Held], other: Mapping[str, Held]) -> Iterator[Promise]:
    """A promise for each field of what is held, over all tensors."""
    for field in {name: None for held in (*one.values(), *other.values()) for name in held.arrays()}:
        there = [(one[name].get(field), other[name].get(field)) for name in other]
        pairs = [(a, b) for a, b in there if a is not None and b is not None]
        if len(pairs) < sum(a is not None or b is not None for a, b in there):
            raise AssertionError(f"{field} is there on one side only")
        if any(a.dtype != b.dtype or a.shape != b.shape for a, b in pairs):
            raise AssertionError(f"{field} has arrived with another dtype or shape")
        yield Promise(f"{field}, {law}", *(np.concatenate([each[i].reshape(-1) for each in pairs]) for i in (0, 1)))
