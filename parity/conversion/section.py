"""The section "conversion": state that crosses frameworks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ...core.compensation import resolve
from ...core.dtypes import PARAMETER_DTYPES
from ..backends.calls import FAILURES
from ..backends.protocol import Backend
from ..cases import Case, Problem, storages
from ..compare import Finding, Refusal, failed, identical, rows
from ..progress import Progress
from ..rules import FAMILY, rules_and_dtypes
from ..settings import named
from ..truth import Truth, truths
from .routes import BACKENDS, HALF, PLAIN_ROUTES, ROUTES, SIDES, ConversionCase, Sides, run_route

SETTING = named("shapes")
"""Tensors of odd shapes, 0-d and zero-size among them."""

QUICK = ("conversion/torch-jax/adam/float32/none", "conversion/jax-torch/stable_adamw/bfloat16/split")
"""What a quick run has."""


class Conversion:
    """The section "conversion" of the suite; `sides` makes the ends of its routes."""

    name = "conversion"
    title = "State that crosses frameworks: the same bits there and back, and a run that goes on within its bounds"

    def __init__(self, sides: Sides = SIDES) -> None:
        self.sides = sides

    def cases(self, *, quick: bool) -> list[ConversionCase]:
        """Every rule, dtype and compensation between plain steps, the defaults between releases; or `QUICK`.

        Rules that are not of Adam's family in float32, between plain steps.
        """
        found = []
        for rule, dtype in rules_and_dtypes(PARAMETER_DTYPES):
            problem = Problem(SETTING, rule, dtype)
            for storage in storages(dtype, "compensations"):
                usual = storage.compensation == resolve("auto", dtype) and rule.name in FAMILY
                found += [ConversionCase(route, Case(problem, storage)) for route in (ROUTES if usual else PLAIN_ROUTES)]
        return [each for each in found if each.name in QUICK] if quick else found

    def run(
        self, backends: Sequence[Backend], cases: Sequence[ConversionCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        """A route runs where the backends of both its ends were chosen; the report has it under the second's."""
        chosen = {backend.name for backend in backends}
        for problem, group in itertools.groupby(cases, key=lambda each: each.case.problem):
            members = list(group)
            progress(members[0].name, "reference")
            (truth,) = truths(problem, list({each.case.storage for each in members}), [2 * HALF]).values()
            for conversion in members:
                start, end = (BACKENDS[side] for side in conversion.route)
                progress(conversion.name, end)
                if {start, end} <= chosen:
                    yield from _findings(conversion, self.sides, end, truth)
                elif chosen & {start, end}:
                    (there,) = chosen & {start, end}
                    (missing,) = {start, end} - chosen
                    yield Refusal(conversion.name, there, f"it exchanges state with {missing}, which does not run")


def _findings(conversion: ConversionCase, sides: Sides, backend: str, truth: Truth) -> Iterator[Finding]:
    """Run one route. An error becomes a broken row, and the suite continues."""
    try:
        promises, held = run_route(conversion, sides)
    except FAILURES as error:
        yield failed(conversion.name, backend, HALF, error, "state")
        return
    for promise in promises:
        yield identical(conversion.name, backend, HALF, promise.quantity, promise.one, promise.other)
    yield from rows(conversion.case, backend, held, truth, name=conversion.name)
