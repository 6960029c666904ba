"""The section "updates": plain updates of a few tensors, on every backend, each compared with the one truth of its problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from .backends.calls import FAILURES, held_after, reason
from .backends.protocol import Backend, flushes, lacks
from .cases import Case, select
from .compare import Finding, Refusal, Row, failed_from, rows
from .progress import Progress, silent
from .truth import Truth, truths


class Updates:
    """The section "updates" of the suite."""

    name = "updates"
    title = (
        "Plain updates against the float64 reference: every rule, Adam and its relatives in every dtype, compensation and state"
    )

    def cases(self, *, quick: bool) -> list[Case]:
        return select(None, quick=quick)

    def run(
        self, backends: Sequence[Backend], cases: Sequence[Case], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        """Cases of one problem stand next to each other and share its truth."""
        for problem, group in itertools.groupby(cases, key=lambda case: case.problem):
            reasons = {case: [refusal(backend, case) for backend in backends] for case in group}
            progress(next(iter(reasons)).name, "reference")
            wanted = [case.storage for case, of_case in reasons.items() if None in of_case]
            truth = truths(problem, wanted, steps) if wanted else {}
            for case, of_case in reasons.items():
                for backend, why in zip(backends, of_case, strict=True):
                    progress(case.name, backend.name)
                    if why is None:
                        yield from run_case(backend, case, truth)
                    else:
                        yield Refusal(case.name, backend.name, why)


def refusal(backend: Backend, case: Case) -> str | None:
    """Return why a backend does not run a case, or None if it does."""
    return lacks(backend, case.problem.needs) or reason(backend, "refuses", case)


def run_cases(backends: Sequence[Backend], cases: Sequence[Case], steps: Sequence[int]) -> list[Row]:
    """Return the rows of these cases on these backends, which need not be registered."""
    found = Updates().run(backends, cases, steps, silent)
    return [finding for finding in found if isinstance(finding, Row)]


def run_case(backend: Backend, case: Case, truth: Mapping[int, Truth]) -> list[Row]:
    """Run one case on one backend. An error becomes a broken row, and the suite continues."""
    found: list[Row] = []
    try:
        for step, held in held_after(backend, case, truth):
            found += rows(case, backend.name, held, truth[step], flushes=flushes(backend))
    except FAILURES as error:
        found += failed_from(case.name, backend.name, truth, found, error)
    return found
