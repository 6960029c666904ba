"""Matrices of how many elements differ between each pair of backends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Cell, table


def matrices(rows: Sequence[Mapping[str, Any]]) -> str:
    """One symmetric matrix a case, number of steps and quantity, from rows that `compare.differing` made.

    A cell is shaded by the logarithm of its count, in parts of that of all elements.
    """
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["steps"], row["quantity"]), []).append(row)
    made = []
    for (case, steps, quantity), members in groups.items():
        names = list(dict.fromkeys(name for row in members for name in (row["data"]["other"], row["backend"])))
        counts = {frozenset((row["data"]["other"], row["backend"])): row["data"] for row in members}
        lines = [[Cell(one), *(_cell(counts.get(frozenset((one, other)))) for other in names)] for one in names]
        elements = max(row["data"]["elements"] for row in members)
        caption = f"{case}, {quantity}, after {steps}: of {elements} elements differ"
        made.append(f"<div>{table(('backend', *names), lines, caption)}</div>")
    return f'<div class="matrices">{"".join(made)}</div>' if made else ""


def _cell(data: Mapping[str, Any] | None) -> Cell:
    if data is None:
        return Cell("")
    share = math.log1p(data["differing"]) / math.log1p(data["elements"]) if data["elements"] else 0.0
    return Cell(str(data["differing"]), share=share)
