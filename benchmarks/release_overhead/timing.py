"""Rows that are timed in turns: every row once a round, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console

from .workloads import Workload

WARM_UP = 3


class Seconds(NamedTuple):
    """Of one step. `thread`: processor time of the calling thread, without what it waits."""

    wall: float
    thread: float


class Timed(NamedTuple):
    """`work` is timed, `before` is run before it and not timed."""

    work: Callable[[], Any]
    before: Callable[[], Any] = lambda: None

    def seconds(self) -> Seconds:
        """Run once."""
        self.before()
        wall, thread = time.perf_counter(), time.thread_time()
        self.work()
        return Seconds(time.perf_counter() - wall, time.thread_time() - thread)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    start: builds what is timed. less: rows whose medians are subtracted. passes: backward passes over the gradients in a step,
    which the time is divided by. base: the row that a ratio is taken to.
    """

    name: str
    start: Callable[[Workload], Timed]
    less: tuple[str, ...] = ()
    passes: int = 1
    base: str | None = None


def interleave(
    rows: Sequence[Row], workload: Workload, rounds: int, *, meet: Callable[[], Any] = lambda: None, quiet: bool = False
) -> dict[str, list[Seconds]]:
    """Seconds of each round, by row. `meet` is called before every step, for instance a barrier of several processes."""
    console = Console(stderr=True, quiet=quiet)
    started = {}
    for row in rows:
        started[row.name] = row.start(workload)
        for number in range(WARM_UP):
            meet()
            taken = started[row.name].seconds()
            if number == 0 and taken.wall > 1:
                console.print(f"{workload.name}, {row.name}: first step {taken.wall:.1f} s")
    found: dict[str, list[Seconds]] = {row.name: [] for row in rows}
    gc.collect()
    gc.freeze()  # otherwise a collection would cost more the more rows there are
    for _ in range(rounds):
        for name, timed in started.items():
            meet()
            found[name].append(timed.seconds())
    gc.unfreeze()
    return found


def figures(
    rows: Sequence[Row], taken: dict[str, list[Seconds]], tensors: int, *, clock: str = "wall"
) -> dict[str, dict[str, float]]:
    """By row: the median of a step, what is left of it over the rows in `less`, and that for a tensor and pass.

    Args:
        clock: "wall" or "thread".
    """
    medians = {name: statistics.median(getattr(seconds, clock) for seconds in times) for name, times in taken.items()}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        over = medians[row.name] - sum(medians[name] for name in row.less)
        found[row.name] = {
            "step_ms": 1e3 * medians[row.name],
            "over_ms": 1e3 * over,
            "passes": row.passes,
            "per_tensor_us": 1e6 * over / tensors / row.passes,
        }
    for row in rows:
        if row.base is not None and row.base in found:
            found[row.name]["ratio_to_base"] = found[row.name]["per_tensor_us"] / found[row.base]["per_tensor_us"]
    return found
