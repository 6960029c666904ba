"""The run of the suite: every case on every backend, each compared with the one truth of its problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from . import backends as registry
from .backends.protocol import Backend
from .cases import STEP_COUNTS, Case, select
from .compare import Row, failed, rows
from .truth import Truth, truths

Progress = Callable[[Case, str], None]
"""Called before each part of the work with the case, and "reference" or the name of the backend."""


def run(backends: Iterable[str] | None = None, cases: str | None = None, steps: Sequence[int] = STEP_COUNTS) -> list[Row]:
    """Run the suite; for use from Python.

    Args:
        backends: names; None takes all that are available.
        cases: a shell pattern, or one part of a case's name; None takes all.
        steps: the numbers of updates after which to compare, each in 1 ... 2000.

    Returns:
        A row for every case, backend, number of steps and quantity. A case that a backend refuses has none.

    Raises:
        InvalidArgument: an unknown backend, or a pattern that matches no case.
        Refused: a backend that was named is not available.
    """
    return run_cases(registry.choose(backends)[0], select(cases), steps)


def run_cases(
    backends: Sequence[Backend], cases: Sequence[Case], steps: Sequence[int], progress: Progress = lambda case, part: None
) -> list[Row]:
    """Every case on every backend. Cases of one problem stand next to each other and share its truth."""
    found = []
    for problem, group in itertools.groupby(cases, key=lambda case: case.problem):
        members = list(group)
        progress(members[0], "reference")
        truth = truths(problem, [case.storage for case in members], steps)
        for case in members:
            for backend in backends:
                progress(case, backend.name)
                if backend.refuses(case) is None:
                    found += run_case(backend, case, truth)
    return found


def run_case(backend: Backend, case: Case, truth: dict[int, Truth]) -> list[Row]:
    """One case on one backend. What the backend raises becomes a broken row, and the suite goes on."""
    found: list[Row] = []
    step = 0
    try:
        running = backend.start(case)
        for step in range(1, max(truth) + 1):
            running.step(case.problem.gradients(step))
            if step in truth:
                found += rows(case, backend.name, running.held(), truth[step])
    except Exception as error:
        failure = f"step {step}: {type(error).__name__}: {error}"
        done = {row.steps for row in found}
        found += [failed(case, backend.name, count, failure) for count in truth if count not in done]
    return found
