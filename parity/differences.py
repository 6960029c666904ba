"""The section "differences": how many elements differ in their bits between each pair of backends. Information, no verdict.

All backends take the same float32 gradients from the same parameters; after the first step, the second (the first that finds
moments) and the hundredth, what they store is compared pair by pair. Which pairs agree, and what parts the others, is written
down in docs/bits.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..core.rules import Rule
from .backends.calls import FAILURES, held_after
from .backends.protocol import Backend, Held
from .cases import Case, Problem, Storage
from .compare import Finding, Refusal, differing, differing_elements, failed
from .progress import Progress
from .rules import FAMILY
from .settings import named
from .updates import refusal

STEPS = (1, 2, 100)
QUANTITIES = ("parameter", "exp_avg", "exp_avg_sq")

_SETTING = named("B")  # whose programs are compiled already


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One rule, in float32 throughout."""

    rule: Rule

    @property
    def name(self) -> str:
        """differences/rule/dtype."""
        return f"differences/{self.rule.name}/float32"

    @property
    def case(self) -> Case:
        """The updates that every backend makes."""
        return Case(Problem(_SETTING, self.rule, "float32"), Storage("none", None))


class Differences:
    """The section "differences" of the suite."""

    name = "differences"
    title = "Elements that differ in their bits between each pair of backends, in float32"

    def cases(self, *, quick: bool) -> list[Comparison]:
        return [Comparison(rule) for rule in FAMILY.values()]

    def run(
        self, backends: Sequence[Backend], cases: Sequence[Comparison], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        """The numbers of steps are the section's own."""
        for comparison in cases:
            case, stored = comparison.case, {}
            for backend in backends:
                progress(comparison.name, backend.name)
                why = refusal(backend, case)
                if why is not None:
                    yield Refusal(comparison.name, backend.name, why)
                    continue
                try:
                    stored[backend.name] = dict(held_after(backend, case, STEPS))
                except FAILURES as error:
                    yield failed(comparison.name, backend.name, max(STEPS), error)
            for (one, its), (other, others) in itertools.combinations(stored.items(), 2):
                for step, quantity in itertools.product(STEPS, QUANTITIES):
                    count = differing_between(its[step], others[step], quantity)
                    if count is not None:
                        elements = case.problem.setting.element_count
                        yield differing(comparison.name, one, other, step, quantity, count, elements)


def differing_between(one: Mapping[str, Held], other: Mapping[str, Held], quantity: str) -> int | None:
    """Return the number of elements of a quantity that differ; None if a backend does not store it in this dtype."""
    count = 0
    for name, held in one.items():
        mine, theirs = held.get(quantity), other[name].get(quantity)
        if mine is None or theirs is None or mine.dtype != theirs.dtype:
            return None
        count += differing_elements(np.asarray(mine), np.asarray(theirs))
    return count
