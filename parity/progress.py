"""Progress of the suite, and the time that each part takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Progress = Callable[[str, str], None]
"""Called before each part of the work with the name of the case, and "reference" or the name of the backend."""


def silent(case_name: str, part: str) -> None:
    """No progress is shown."""


def each(
    cases: Iterable[Any], backends: Sequence[Any], progress: Progress, run_case: Callable[[Any, Any], Iterable[Any]]
) -> Iterator[Any]:
    """Yield the results of `run_case(backend, case)` for every case on every backend."""
    for case in cases:
        for backend in backends:
            progress(case.name, backend.name)
            yield from run_case(backend, case)


class Stopwatch:
    """A `Progress` that calls another one, and adds up the seconds between calls by the second argument."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._progress = progress
        self._part: str | None = None
        self._since = time.perf_counter()

    def __call__(self, case_name: str, part: str) -> None:
        """A part begins."""
        self.stop()
        self._part = part
        self._progress(case_name, part)

    def stop(self) -> None:
        """The last part has ended."""
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = None, now
