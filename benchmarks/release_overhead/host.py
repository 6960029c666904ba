"""Host time of plain and released steps in one process: torch's, optimi's, and penstock's in every backend and mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.methods import IN_HOOKS, LR, METHODS, OPTIMIZERS, Method
from benchmarks.support import Goal, matching, ratio

from .modes import MODES, bare_rows, mode_rows, plain, row_name, unreleased
from .timing import Row, Timed, figures, interleave
from .workloads import Workload, loss_of

GOALS = {  # (row, the row that it is compared with, largest ratio)
    "small": [
        ("penstock AdamW release, default", "optimi AdamW release", 0.85),
        ("penstock AdamW release, default", IN_HOOKS, 0.8),
        ("penstock StableAdamW release, default", "optimi StableAdamW release", 0.9),
        ("penstock AdamW plain, default", "optimi AdamW plain", 1.0),
        ("penstock StableAdamW plain, default", "optimi StableAdamW plain", 1.0),
    ],
    "medium": [
        ("penstock AdamW release, default", IN_HOOKS, 2.0),
        ("penstock StableAdamW release, default", "optimi StableAdamW release", 1.3),
        ("penstock AdamW release, compiled", IN_HOOKS, 1.5),
    ],
}
MODE_GOAL = 1.5
"""Largest ratio of every mode to the default path of the same rule, per gradient and pass."""


def row_of(method: Method) -> Row:
    """Return the row of a method. Of a plain optimizer only step() and zero_grad() are timed."""
    if method.release is None:
        return plain(method.name, lambda parameters: method.make(parameters, lr=LR))

    def start(workload: Workload) -> Timed:
        model, batch = workload.model(), workload.batch()
        close = method.attach(model).close

        def step() -> None:
            loss_of(model, batch).backward()
            close()

        return Timed(step)

    return Row(method.name, start, ("bare",))


def rows_of(workload: Workload, *, compiled: bool) -> list[Row]:
    """Return every row: bare passes, the methods for float32 that run here, and every mode of penstock's release."""
    methods = [each for each in METHODS.values() if "fp32" in each.dtypes and (compiled or each.suite != "compiled")]
    modes = [row for rule in OPTIMIZERS if workload.modes for row in mode_rows(rule)]
    return [*bare_rows(modes=workload.modes), *(row_of(each) for each in methods if each.missing() is None), *modes]


def select(rows: list[Row], patterns: Sequence[str]) -> list[Row]:
    """Return the rows whose names match a pattern, and those that they are compared with."""
    by_name = {row.name: row for row in rows}
    chosen = set(matching(by_name, patterns))
    chosen |= {base for name in chosen if (base := by_name[name].base) is not None}
    chosen |= {needed for name in chosen for needed in by_name[name].less}
    return [row for row in rows if row.name in chosen]


def measure(workload: Workload, rounds: int, *, patterns: Sequence[str] = ("*",), compiled: bool = True) -> dict[str, Any]:
    """Time the rows of one model."""
    rows = select(rows_of(workload, compiled=compiled), patterns)
    threads = torch.get_num_threads()
    torch.set_num_threads(workload.threads or threads)
    try:
        found = figures(rows, interleave(rows, workload, rounds), workload.tensors)
        return {"tensors": workload.tensors, "rounds": rounds, "threads": torch.get_num_threads(), "rows": found}
    finally:
        torch.set_num_threads(threads)


def goals(workload: Workload, rows: dict[str, dict[str, float]]) -> list[Goal]:
    """Return the goals for this model's rows."""
    # Small tensors are nearly all overhead, so their goals are for "over"; those of larger ones for the whole training step.
    key, label = ("over_ms", "") if workload.modes else ("step_ms", ", whole step")
    found = [
        Goal(f"{workload.name}{label}: {row} / {over}", at_most, ratio(*(rows.get(name, {}).get(key) for name in (row, over))))
        for row, over, at_most in GOALS.get(workload.name, [])
    ]
    for rule in OPTIMIZERS if workload.modes else ():
        for mode in MODES:
            name, without = row_name(rule, mode.name), unreleased(mode)
            row = rows.get(name, {})
            found.append(Goal(f"{workload.name}: {name} / default", MODE_GOAL, row.get("ratio_to_base")))
            if without in rows and name in rows:  # the part of the overhead that release adds
                added = (row["over_ms"] - rows[without]["over_ms"]) / row["over_ms"] * row["ratio_to_base"]
                found.append(Goal(f"{workload.name}: {name}, over the same without release / default", MODE_GOAL, added))
    return found
