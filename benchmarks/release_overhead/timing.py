"""Timing of rows in turns: every row once per round, so that other load on the machine affects all rows equally.

The order of a round is random, the same in every run and process: a row finds its code in the caches if one like it ran before.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console

from .workloads import Workload

WARM_UP = 3


class Seconds(NamedTuple):
    """Seconds of one step. wall: wall-clock time. thread: processor time of the calling thread."""

    wall: float
    thread: float


class Timed(NamedTuple):
    """A function to time, `work`, and one to run before it without timing, `before`."""

    work: Callable[[], Any]
    before: Callable[[], Any] = lambda: None

    def seconds(self) -> Seconds:
        """Run once, and return the time."""
        self.before()
        wall, thread = time.perf_counter(), time.thread_time()
        self.work()
        return Seconds(time.perf_counter() - wall, time.thread_time() - thread)


class Taken(NamedTuple):
    """What the steps of a row have taken. first: the very first step. rounds: those after the warm-up."""

    first: Seconds
    rounds: list[Seconds]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    start: builds the function to time. less: rows whose medians are subtracted. passes: passes over the gradients in a step,
    by which the time is divided. base: the row to which the ratio is taken.
    """

    name: str
    start: Callable[[Workload], Timed]
    less: tuple[str, ...] = ()
    passes: int = 1
    base: str | None = None


def interleave(
    rows: Sequence[Row], workload: Workload, rounds: int, *, meet: Callable[[], Any] = lambda: None, quiet: bool = False
) -> dict[str, Taken]:
    """Return what each row has taken. meet: called before every step, for instance a barrier of processes."""
    console = Console(stderr=True, quiet=quiet)
    started, found = {}, {}
    for row in rows:
        started[row.name] = row.start(workload)
        for number in range(WARM_UP):
            meet()
            taken = started[row.name].seconds()
            if number == 0:
                found[row.name] = Taken(taken, [])
                if taken.wall > 1:
                    console.print(f"{workload.name}, {row.name}: first step {taken.wall:.1f} s")
    gc.collect()
    gc.freeze()  # otherwise the time of a garbage collection would grow with the number of rows
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(started), len(started)):
            meet()
            found[name].rounds.append(started[name].seconds())
    gc.unfreeze()
    return found


def figures(rows: Sequence[Row], taken: dict[str, Taken], tensors: int, *, clock: str = "wall") -> dict[str, dict[str, float]]:
    """Return by row the first step, the median of a step, that minus the rows in `less`, and per tensor and pass.

    Args:
        rows: all rows, including those in `less`.
        taken: of `interleave`, by row.
        tensors: number of parameters.
        clock: "wall" or "thread".
    """
    medians = {name: statistics.median(getattr(seconds, clock) for seconds in times.rounds) for name, times in taken.items()}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        over = medians[row.name] - sum(medians[name] for name in row.less)
        found[row.name] = {
            "first_ms": 1e3 * getattr(taken[row.name].first, clock),
            "step_ms": 1e3 * medians[row.name],
            "over_ms": 1e3 * over,
            "passes": row.passes,
            "per_tensor_us": 1e6 * over / tensors / row.passes,
        }
    for row in rows:
        if row.base is not None and row.base in found:
            found[row.name]["ratio_to_base"] = found[row.name]["per_tensor_us"] / found[row.base]["per_tensor_us"]
    return found
