"""Runs the sections, prints the tables, and writes the JSON and the figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support import print_tables, write_result

from . import figure, tables

JSON, PNG = "bench.json", "bench.png"


def of_torch(name: str) -> Callable[..., dict[str, Any]]:
    """Return a section of PyTorch's methods, which is imported when it is run."""

    def section(*, quick: bool) -> dict[str, Any]:
        from . import torch_methods

        if name == "losses":
            return torch_methods.losses(figure.PAIRS, quick=quick)
        measured: dict[str, Any] = getattr(torch_methods, name)(quick=quick)
        return measured

    return section


def of_jax(*, quick: bool) -> dict[str, Any]:
    """Run the section of JAX's methods."""
    from . import jax_methods

    return jax_methods.measure(quick=quick)


SECTIONS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "memory": ("torch", of_torch("memory")),
    "time": ("torch", of_torch("times")),
    "error": ("torch", of_torch("errors")),
    "loss": ("torch", of_torch("losses")),
    "jax": ("jax", of_jax),
}
"""By name: the framework that it needs, and what runs it."""


def run(sections: Sequence[str], out: Path, *, quick: bool) -> None:
    """Measure, print, and write `JSON` and, where memory and losses were measured, `PNG` to a directory."""
    console, errors = Console(width=160, highlight=False), Console(stderr=True)
    result: dict[str, Any] = {"quick": quick}
    skipped: dict[str, str] = {}
    for name in sections:
        framework, section = SECTIONS[name]
        if find_spec(framework) is None:
            skipped[f"section {name}"] = f"{framework} is not installed"
            continue
        errors.print(f"measuring: {name}")
        result[name] = section(quick=quick)
        if framework == "torch":
            from . import torch_methods

            skipped |= torch_methods.skipped()
        skipped |= result[name].pop("skipped", {})
        result["skipped"] = skipped
        write_result(out / JSON, result)  # after each section: what is interrupted keeps what it has
    for framework, heading, rows in (
        ("torch", tables.TORCH, tables.torch_rows(result)),
        ("jax", tables.JAX, tables.jax_rows(result)),
    ):
        if rows:
            table = Table(*heading)
            table.columns[0].no_wrap = True
            for column in table.columns[1:]:
                column.justify = "right"
            for row in rows:
                table.add_row(*row)
            print_tables([table], width=160)
            console.print(tables.note(framework, result), markup=False)
    for name, reason in skipped.items():
        console.print(f"{name} did not run: {reason}", markup=False, soft_wrap=True)
    written = [out / JSON]
    if {"memory", "loss"} <= set(result):
        figure.draw(result, out / PNG)
        written.append(out / PNG)
    console.print(*(f"written: {path}" for path in written), sep="\n", markup=False, soft_wrap=True)
