"""Runs the suite: every section on every backend."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.errors import InvalidArgumentError, RefusedError
from . import backends as registry
from .backends.protocol import Backend, is_peer
from .cases import STEP_COUNTS
from .compare import Refusal, Row
from .progress import Progress, Stopwatch, silent
from .sections import Section, select


@dataclasses.dataclass(frozen=True)
class SectionResult:
    """The results of one section.

    seconds: that each backend took, and "reference".
    """

    section: Section
    rows: Sequence[Row]
    refusals: Sequence[Refusal]
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a run of the suite.

    backends: the names of those that ran, peers last.
    peers: which of them are peers: compared, but not judged.
    seconds: in all.
    """

    sections: Sequence[SectionResult]
    backends: Sequence[str]
    peers: frozenset[str]
    seconds: float

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for found in self.sections for row in found.rows]

    @property
    def broken(self) -> list[Row]:
        """The rows that break a bound, except those of peers."""
        return [row for row in self.rows if self.breaks(row)]

    def breaks(self, row: Row) -> bool:
        """Whether a row breaks a bound that its backend must keep."""
        return not row.within and row.backend not in self.peers


def run(backends: Iterable[str] | None = None, cases: str | None = None, steps: Sequence[int] = STEP_COUNTS) -> list[Row]:
    """Run the suite; for use from Python.

    Args:
        backends: names; None takes all that are available, without peers, whose rows have no verdict.
        cases: a shell pattern, one part of a case's name, or the name of a section; None takes all.
        steps: the numbers of updates after which to compare plain updates, each at least 1; a case that is shorter stops at
            its own end.

    Returns:
        A row for every case, backend, number of steps and quantity: at least one. A case that a backend refuses has none.

    Raises:
        InvalidArgumentError: an unknown backend or one that cannot say what it runs, a pattern that matches no case, or a
            number of steps that is none.
        RefusedError: a backend that was named is not available, or the backends refuse every one of the cases.
    """
    steps = list(steps)
    if not steps or any(not isinstance(count, int) or count < 1 for count in steps):
        raise InvalidArgumentError(f"steps={steps} must be numbers of updates from 1 on, such as [1, 100].")
    chosen = registry.choose(backends)[0]
    rows = run_sections(
        chosen if backends is not None else [each for each in chosen if not is_peer(each)], select(cases), steps
    ).rows
    if not rows:
        raise RefusedError("the backends refuse every one of these cases; choose others with backends=... or cases=...")
    return rows


def run_sections(
    backends: Sequence[Backend],
    chosen: Sequence[tuple[Section, Sequence[Any]]],
    steps: Sequence[int],
    progress: Progress = silent,
) -> Result:
    """Sections with their chosen cases, as `sections.select` returns them, on given backends.

    Raises:
        BrokenBackendError: a backend cannot say whether it runs a case.
    """
    started = time.perf_counter()
    backends = sorted(backends, key=is_peer)
    results = []
    for section, cases in chosen:
        watch = Stopwatch(progress)
        found = list(section.run(backends, cases, steps, watch))
        watch.stop()
        rows = [finding for finding in found if isinstance(finding, Row)]
        refusals = [finding for finding in found if isinstance(finding, Refusal)]
        visited = {finding.case for finding in found}
        refusals += [
            Refusal(case.name, backend.name, "it takes no part in this section")
            for case in cases
            if case.name not in visited
            for backend in backends
        ]
        results.append(SectionResult(section, rows, refusals, dict(watch.seconds)))
    names = [backend.name for backend in backends]
    peers = frozenset(backend.name for backend in backends if is_peer(backend))
    return Result(results, names, peers, time.perf_counter() - started)
