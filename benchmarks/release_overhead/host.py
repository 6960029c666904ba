"""Host time of plain and released steps in one process: torch's, optimi's, and penstock's in every backend and mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers import optimi, optimi_optimizer, release_by_optimi, release_in_torch_hooks
from benchmarks.support import Goal, matching, ratio

from .modes import LR, MODES, OPTIMIZERS, Mode, bare_rows, mode_rows, plain, released, row_name, unreleased
from .timing import Row, Timed, figures, interleave
from .workloads import Workload, loss_of

IN_HOOKS = "torch AdamW fused in hooks"
BACKENDS = {"default": "auto", "eager": "eager", "compiled": "compiled"}

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


def torch_rows() -> list[Row]:
    """Return the rows of torch.optim.AdamW, plain and in hooks as in PyTorch's tutorial."""

    def in_hooks(workload: Workload) -> Timed:
        model, batch = workload.model(), workload.batch()
        release_in_torch_hooks(model, lambda parameters: torch.optim.AdamW(parameters, lr=LR, fused=True))
        return Timed(lambda: loss_of(model, batch).backward())

    return [
        plain("torch AdamW fused plain", lambda p: torch.optim.AdamW(p, lr=LR, fused=True)),
        plain("torch AdamW foreach plain", lambda p: torch.optim.AdamW(p, lr=LR, foreach=True)),
        Row(IN_HOOKS, in_hooks, ("bare",)),
    ]


def optimi_rows() -> list[Row]:
    """Return the rows of optimi's optimizers, plain and under its own release; none if it is not installed."""

    def releases(rule: str) -> Row:
        def start(workload: Workload) -> Timed:
            model, batch = workload.model(), workload.batch()
            optimizer = release_by_optimi(model, rule, lr=LR)

            def step() -> None:  # both calls stay in the loop in optimi's guide, for schedulers
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            return Timed(step)

        return Row(f"optimi {rule} release", start, ("bare",))

    def plainly(rule: str) -> Row:
        return plain(f"optimi {rule} plain", lambda p: optimi_optimizer(rule, p, lr=LR))

    return [] if optimi() is None else [row(rule) for rule in OPTIMIZERS for row in (plainly, releases)]


def our_rows(*, modes: bool, compiled: bool) -> list[Row]:
    """Return penstock's rows: plain and released on every backend, and every mode of release on the default one."""

    def plainly(rule: str, name: str, backend: str) -> Row:
        return plain(f"penstock {rule} plain, {name}", lambda p: OPTIMIZERS[rule](p, lr=LR, backend=backend))

    backends = {name: backend for name, backend in BACKENDS.items() if compiled or backend != "compiled"}
    rows = [plainly(rule, *pair) for rule in OPTIMIZERS for pair in backends.items()]
    for rule in OPTIMIZERS:
        rows += [released(rule, Mode(name), backend=backend) for name, backend in backends.items()]
    return rows + [row for rule in OPTIMIZERS if modes for row in mode_rows(rule)]


def select(rows: list[Row], patterns: Sequence[str]) -> list[Row]:
    """Return the rows whose names match a pattern, and those that they are compared with."""
    by_name = {row.name: row for row in rows}
    chosen = set(matching(by_name, patterns))
    chosen |= {base for name in chosen if (base := by_name[name].base) is not None}
    chosen |= {needed for name in chosen for needed in by_name[name].less}
    return [row for row in rows if row.name in chosen]


def measure(workload: Workload, rounds: int, *, patterns: Sequence[str] = ("*",), compiled: bool = True) -> dict[str, Any]:
    """Time the rows of one model."""
    rows = [*bare_rows(modes=workload.modes), *torch_rows(), *optimi_rows()]
    rows = select([*rows, *our_rows(modes=workload.modes, compiled=compiled)], patterns)
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
