"""How a fault is planted into the real code, run through the suite, and taken out again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.parity import backends as registry
from penstock.parity.report import summary
from penstock.parity.report.terminal import complaint
from penstock.parity.sections import SECTIONS
from penstock.parity.suite import Result, run_sections

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, and where it shows.

    name: what is wrong.
    plant: patches functions or attributes, of the library only.
    case: the name of the case that catches it; its first part, or "updates", is the section.
    backend: on which.
    steps: of plain updates.
    """

    name: str
    plant: Plant
    case: str
    backend: str
    steps: int = 3


def run(fault: Fault) -> Result:
    """The case of a fault on its backend, through the suite, with nothing compiled or cached before."""
    ((section, case),) = ((s, case) for s in SECTIONS for case in s.cases(quick=False) if case.name == fault.case)
    clear()
    names = frameworks_of(fault)
    return run_sections(registry.choose(names)[0], [(section, [case])], (fault.steps,))


def frameworks_of(fault: Fault) -> list[str]:
    """Its backend, and the one that it is compared with where the section compares two."""
    return ["eager", "jax"] if fault.case.startswith("frameworks/") else [fault.backend]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault in force."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        yield
    clear()


def clear() -> None:
    """Forget what was compiled, or computed from functions that a fault replaces."""
    import penstock.parity.backends.jax_transforms as transforms
    import penstock.parity.backends.jax_walk as walk
    import penstock.parity.events.jax_steps as steps

    for cached in (transforms._transform_and_update, walk._transform_and_step, steps._transform, steps._train_step):
        cached.cache_clear()
    steps._release_step.cache_clear()


def caught(fault: Fault, result: Result) -> bool:
    """Whether the report names the case and the backend, for numbers that are wrong and not for an exception."""
    numbers = {complaint(row) for row in result.broken if row.failure is None}
    return any(sentence.startswith(f"{fault.case} on {fault.backend} after ") for sentence in numbers & set(summary(result)))


def instead(module: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """Replace a function or method by `wrong`, which gets the correct one as its first argument."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        correct = getattr(module, name)
        patch.setattr(module, name, lambda *args, **kwargs: wrong(correct, *args, **kwargs))

    return plant


def value(module: Any, name: str, wrong: Any) -> Plant:
    """Replace an attribute."""
    return lambda patch: patch.setattr(module, name, wrong)


def both(*plants: Plant) -> Plant:
    """All of them: one fault that is in several places."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant
