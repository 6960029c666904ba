"""What a plain and a released step cost beside the arithmetic, for penstock and its peers, and the goals.

    python -m benchmarks.release_overhead [--sections NAME ...] [--models NAME ...] [--rows PATTERN ...] [--rounds N]
                                          [--quick] [--out FILE]

Sections: host (rows timed in turns in one process; small also every mode of release), processes (two gloo processes),
calls (Python calls of ours a gradient), jax (make_update), first_step (with and without the compiler). Figures are medians
over the rounds. "over" is a step without the bare forward and backward that belong to it; of a plain optimizer only step()
and zero_grad() are timed. Run it on an idle machine, and read ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.goals import Goal, goals_table
from benchmarks.record import write_result

from . import calls, first_step, host, processes
from .workloads import TINY, WORKLOADS, Workload

RESULT = Path(__file__).parents[1] / "results" / "release_overhead.json"
Section = tuple[dict[str, Any], list[Goal], list[Table]]


def host_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Every row of every model."""
    found, reached, tables = {}, [], []
    for workload in workloads:
        figures = host.measure(workload, given.rounds, patterns=given.rows, compiled=not given.quick)
        found[workload.name] = figures
        reached += host.goals(workload, figures["rows"])
        tables.append(rows_table(figures, f"{workload.name}: {figures['tensors']} tensors, {given.rounds} rounds"))
    return found, reached, tables


def processes_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """The process group, DDP and FSDP2 on the model that has the modes."""
    workload = TINY if given.quick else WORKLOADS["small"]
    figures = processes.measure(workload, given.rounds)
    title = f"{figures['ranks']} processes, {workload.name}, processor time of the thread, {given.rounds} rounds"
    return figures, processes.goals(figures["rows"]), [rows_table(figures, title)]


def calls_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Python calls of ours for a gradient on the base path."""
    found = calls.measure(TINY if given.quick else WORKLOADS["small"])
    table = Table("rule", "calls a gradient", "functions", "files", title="Python calls of ours, released")
    for rule, row in found.items():
        table.add_row(rule, f"{row['per_gradient']:.1f}", str(row["functions"]), str(row["files"]))
    return found, calls.goals(found), [table]


def jax_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """make_update for each number of leaves."""
    from . import jax_update

    found, reached, tables = {}, [], []
    for leaves in (6,) if given.quick else jax_update.LEAVES:
        rows = jax_update.measure(leaves, given.rounds, 1 if given.quick else jax_update.PROCESSES)
        found[f"{leaves} leaves"] = rows
        reached += jax_update.goals(leaves, rows)
        table = Table("update", "first (s)", "median (ms)", "ratio", title=f"JAX, {leaves} leaves of 16x16")
        for name, row in rows.items():
            table.add_row(name, f"{row['first_s']:.1f}", f"{row['median_ms']:.2f}", f"{row['ratio']:.2f}")
        tables.append(table)
    return found, reached, tables


def first_step_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Seconds, by backend and state of the compiler's cache."""
    found = first_step.measure(quick=given.quick)
    table = Table("backend", "is", "first step (s)", "second (s)", "compiled graphs", title="first plain step() of a Llama")
    for name, row in found.items():
        table.add_row(name, row["backend"], f"{row['first_s']:.2f}", f"{row['second_s']:.2f}", str(row["graphs"]))
    return found, first_step.goals(found), [table]


SECTIONS: dict[str, Callable[[argparse.Namespace, Sequence[Workload]], Section]] = {
    "host": host_section,
    "processes": processes_section,
    "calls": calls_section,
    "jax": jax_section,
    "first_step": first_step_section,
}


def rows_table(figures: dict[str, Any], title: str) -> Table:
    """One line a row."""
    has_wall = any("wall_ms" in row for row in figures["rows"].values())
    wall = ["wall (ms)"] if has_wall else []
    table = Table("row", *wall, "step (ms)", "over (ms)", "a tensor and pass (us)", "ratio to base", title=title)
    for name, row in figures["rows"].items():
        ratio = f"{row['ratio_to_base']:.2f}" if "ratio_to_base" in row else ""
        wall = [f"{row['wall_ms']:.2f}"] if has_wall else []
        table.add_row(name, *wall, f"{row['step_ms']:.2f}", f"{row['over_ms']:.2f}", f"{row['per_tensor_us']:.1f}", ratio)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the figures after every section, so that a run that is cut short leaves what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], metavar="PATTERN", help="of the section host, as 'penstock*release*'"
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, and nothing is compiled: to see that all of it runs"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    workloads = [TINY] if given.quick else [WORKLOADS[name] for name in given.models]
    console = Console(width=None if sys.stdout.isatty() else 120)  # a file has room for whole lines
    result: dict[str, Any] = {"settings": {"rounds": given.rounds, "quick": given.quick}}
    reached: list[Goal] = []
    for name in given.sections:
        result[name], goals, tables = SECTIONS[name](given, workloads)
        reached += goals
        result["goals"] = [goal.as_json() for goal in reached]
        for table in tables:
            console.print(table)
        write_result(given.out, result)
    console.print(goals_table(reached, "goals"))


if __name__ == "__main__":
    main()
