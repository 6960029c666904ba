"""The sections of the suite, each in its own module or folder and with a row of `SECTIONS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..core.errors import InvalidArgumentError
from .backends.protocol import Backend
from .cases import matches
from .codings import Codings
from .compare import Finding
from .conversion import Conversion
from .differences import Differences
from .events import Events
from .frameworks import Frameworks
from .identity import Identity
from .markers import Markers
from .memory import Memory
from .progress import Progress
from .trajectories import Trajectories
from .updates import Updates


class Section(Protocol):
    """One kind of evidence.

    name: the first part of the names of its cases (those of `updates` begin with their setting).
    title: one line for the report: what is compared with what.

    Cases are what the section likes; each has a `name`, its parts separated by slashes.
    """

    @property
    def name(self) -> str:
        """First part of the names of its cases."""
        ...

    @property
    def title(self) -> str:
        """One line for the report."""
        ...

    def cases(self, *, quick: bool) -> Sequence[Any]:
        """All cases; with `quick` those of a quick run."""
        ...

    def run(
        self, backends: Sequence[Backend], cases: Sequence[Any], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        """Run the cases, in their order, and yield what is found as it is found.

        A case that a backend does not run yields a `Refusal`; what its run raises, a row by `compare.failed`.

        Args:
            backends: those that were chosen, available ones. What a backend can do beyond plain updates it says by
                further methods, which the section looks for.
            cases: some of `cases`.
            steps: the numbers of updates after which to compare, for sections that compare at several.
            progress: to be called before each part, with the case's name and the backend's or "reference".

        Raises:
            BrokenBackendError: a backend cannot say whether it runs a case.
        """
        ...


SECTIONS: tuple[Section, ...] = (
    Updates(),
    Codings(),
    Events(),
    Identity(),
    Memory(),
    Markers(),
    Trajectories(),
    Frameworks(),
    Conversion(),
    Differences(),
)
"""In the order in which they run."""


def select(pattern: str | None, *, quick: bool = False) -> list[tuple[Section, list[Any]]]:
    """The sections that have cases whose name matches, with these cases.

    Args:
        pattern: a shell pattern (``B/*/bfloat16/*``), one part of a case's name (``adamw``) or the name of a section
            (``updates``); None: all cases.
        quick: with pattern None, the cases of a quick run only.

    Raises:
        InvalidArgumentError: no case does.
    """
    if pattern is None:
        return [(section, list(section.cases(quick=quick))) for section in SECTIONS]
    chosen = []
    for section in SECTIONS:
        cases = section.cases(quick=False)
        found = [case for case in cases if pattern == section.name or matches(case.name, pattern)]
        if found:
            chosen.append((section, found))
    if not chosen:
        example = SECTIONS[0].cases(quick=True)[0].name
        raise InvalidArgumentError(
            f"no case matches {pattern!r}; names look like {example}, and a pattern like 'B/*/bfloat16/*' or 'adamw'. "
            f"The sections are {', '.join(section.name for section in SECTIONS)}."
        )
    return chosen
