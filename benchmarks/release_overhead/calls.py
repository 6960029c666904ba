"""Number of Python calls of this package's functions per released gradient, which is the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import penstock.core
import penstock.torch_frontend
from benchmarks.support import Goal

from .modes import LR, OPTIMIZERS
from .workloads import WORKLOADS, Workload, loss_of

FOLDERS = tuple(f"{Path(package.__path__[0])}/" for package in (penstock.core, penstock.torch_frontend))
"""The folders of the package's functions, as in `co_filename` of code objects."""

MOST_CALLS = 30


class Calls(NamedTuple):
    """Counts of one backward pass under release. per_gradient: calls / parameters. functions, files: distinct ones."""

    per_gradient: float
    functions: int
    files: int


def count_calls(optimizer_class: type, *, workload: Workload = WORKLOADS["small"], **release_settings: Any) -> Calls:
    """Count the calls during the third backward(), when state and hooks exist.

    Args:
        optimizer_class: of penstock.torch_frontend, on the default backend.
        workload: the model.
        release_settings: of release_gradients; the loss is always passed through guard().
    """
    model, batch = workload.model(), workload.batch()
    optimizer = optimizer_class(model.parameters(), lr=LR)
    release = penstock.torch_frontend.release_gradients(model, optimizer, **release_settings)
    seen: Counter[CodeType] = Counter()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            seen[frame.f_code] += 1

    for number in range(3):
        loss = release.guard(loss_of(model, batch))
        before = sys.getprofile()
        if number == 2:  # autograd runs hooks of CPU tensors in the thread that calls backward()
            sys.setprofile(notice)
        try:
            loss.backward()
        finally:
            sys.setprofile(before)
        optimizer.step()
        optimizer.zero_grad()
    release.remove()
    return Calls(seen.total() / workload.tensors, len(seen), len({code.co_filename for code in seen}))


def calls_per_gradient(optimizer_class: type, **release_settings: Any) -> float:
    """Return `count_calls(...).per_gradient`."""
    return count_calls(optimizer_class, **release_settings).per_gradient


def measure(workload: Workload) -> dict[str, dict[str, float]]:
    """Return the counts of the default path, by rule."""
    return {rule: count_calls(kind, workload=workload)._asdict() for rule, kind in OPTIMIZERS.items()}


def goals(found: dict[str, dict[str, float]]) -> list[Goal]:
    """Return the goals: at most `MOST_CALLS` calls per gradient."""
    return [
        Goal(f"Python calls of ours for a gradient, {rule}", MOST_CALLS, row["per_gradient"]) for rule, row in found.items()
    ]
