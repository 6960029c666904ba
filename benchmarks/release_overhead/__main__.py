"""The overhead of plain and released steps of penstock and its peers, and the goals for it.

    python -m benchmarks.release_overhead [--sections NAME ...] [--models NAME ...] [--rows PATTERN ...] [--rounds N]
                                          [--quick] [--out FILE]

Sections: host (rows timed in turns in one process; on the small model also every mode of release), processes (two gloo
processes), calls (Python calls of penstock per gradient), jax (make_update), first_step (with and without the compiler).
Figures are medians over the rounds. "over" is a step minus the bare forward and backward with the same passes; for a plain
optimizer only step() and zero_grad() are timed. Run it on an idle machine, and compare ratios.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.support import RESULTS, Goal, goals_table, parser_of, print_tables, write_result

from . import calls, first_step, host, processes
from .workloads import TINY, WORKLOADS, Workload

RESULT = RESULTS / "release_overhead.json"
Section = tuple[dict[str, Any], list[Goal], list[Table]]


def host_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Time every row of every model."""
    found, reached, tables = {}, [], []
    for workload in workloads:
        figures = host.measure(workload, given.rounds, patterns=given.rows, compiled=not given.quick)
        found[workload.name] = figures
        reached += host.goals(workload, figures["rows"])
        tables.append(rows_table(figures, f"{workload.name}: {figures['tensors']} tensors, {given.rounds} rounds"))
    return found, reached, tables


def processes_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Time the process group, DDP and FSDP2 on the small model."""
    workload = TINY if given.quick else WORKLOADS["small"]
    figures = processes.measure(workload, given.rounds)
    title = f"{figures['ranks']} processes, {workload.name}, processor time of the thread, {given.rounds} rounds"
    return figures, processes.goals(figures["rows"]), [rows_table(figures, title)]


def calls_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Count Python calls of penstock per gradient on the default path."""
    found = calls.measure(TINY if given.quick else WORKLOADS["small"])
    table = Table("rule", "calls per gradient", "functions", "files", title="Python calls of penstock, released")
    for rule, row in found.items():
        table.add_row(rule, f"{row['per_gradient']:.1f}", str(row["functions"]), str(row["files"]))
    return found, calls.goals(found), [table]


def jax_section(given: argparse.Namespace, workloads: Sequence[Workload]) -> Section:
    """Time make_update for each number of leaves."""
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
    """Time the first step by backend and state of the compiler's cache."""
    found = first_step.measure(quick=given.quick)
    table = Table("row", "backend", "first step (s)", "second (s)", "compiled graphs", title="first plain step() of a Llama")
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
    """Return a table with one line per row."""
    has_wall = any("wall_ms" in row for row in figures["rows"].values())
    wall = ["wall (ms)"] if has_wall else []
    table = Table("row", *wall, "step (ms)", "over (ms)", "per tensor and pass (us)", "ratio to base", title=title)
    for name, row in figures["rows"].items():
        ratio = f"{row['ratio_to_base']:.2f}" if "ratio_to_base" in row else ""
        wall = [f"{row['wall_ms']:.2f}"] if has_wall else []
        table.add_row(name, *wall, f"{row['step_ms']:.2f}", f"{row['over_ms']:.2f}", f"{row['per_tensor_us']:.1f}", ratio)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; write the figures after every section, so that an interrupted run leaves those before."""
    parser = parser_of(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], metavar="PATTERN", help="of the section host, as 'penstock*release*'"
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--quick", action="store_true", help="a tiny model without compilation, to test the benchmark")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    workloads = [TINY] if given.quick else [WORKLOADS[name] for name in given.models]
    result: dict[str, Any] = {"settings": {"rounds": given.rounds, "quick": given.quick}}
    reached: list[Goal] = []
    for name in given.sections:
        result[name], goals, tables = SECTIONS[name](given, workloads)
        reached += goals
        result["goals"] = [goal.as_json() for goal in reached]
        print_tables(tables)
        write_result(given.out, result)
    print_tables([goals_table(reached)])


if __name__ == "__main__":
    main()
