"""What the losses say: how far each coding is from float32, in tables and as goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support import Goal

from .rows import LIMIT, ROWS

Losses = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Mean loss of the last steps by framework, row and seed."""

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}


def differences(losses: Losses, framework: str, name: str) -> list[float]:
    """Return the loss of a row less that of its float32 run, by the seeds that both have been trained with."""
    own, base = losses.get(framework, {}).get(name, {}), losses.get(framework, {}).get(ROWS[name].base or name, {})
    return [own[seed] - base[seed] for seed in own if seed in base]


def goals(losses: Losses) -> list[Goal]:
    """Return the law for each row; for one that is to differ, that it exceeds the limit."""
    found = []
    for framework, shown in FRAMEWORKS.items():
        for name, row in ROWS.items():
            seeds = differences(losses, framework, name)
            if row.base is None or not seeds:
                continue
            off = abs(statistics.fmean(seeds)) / LIMIT
            if row.loses:
                found.append(Goal(f"{shown}: {LIMIT} / difference of {name}", 1.0, 1.0 / max(off, 1e-9)))
            else:
                found.append(Goal(f"{shown}: difference of {name} / {LIMIT}", 1.0, off))
    return found


HEADING = ("", *(f"{shown}, {what}" for shown in FRAMEWORKS.values() for what in ("loss", "difference")))


def table_rows(losses: Losses) -> list[list[str]]:
    """Return the cells of a table: of each row the mean loss, and the mean difference with its standard error."""
    made = []
    for name, row in ROWS.items():
        if not any(name in rows for rows in losses.values()):
            continue
        cells = []
        for framework in FRAMEWORKS:
            seeds = list(losses.get(framework, {}).get(name, {}).values())
            cells.append(f"{statistics.fmean(seeds):.4f}" if seeds else "-")
            cells.append("-" if row.base is None else _with_error(differences(losses, framework, name)))
        made.append([name, *cells])
    return made


def _with_error(values: Sequence[float]) -> str:
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.5f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.5f}{error}"


def drawn(result: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return what the figure shows: by framework and row the differences, one a seed."""
    losses = result["losses"]
    return {
        framework: {name: seeds for name, row in ROWS.items() if row.base and (seeds := differences(losses, framework, name))}
        for framework in FRAMEWORKS
    }
