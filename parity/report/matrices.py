"""How many elements differ between each pair of backends: matrices, or one table where there is one pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Cell, table

Rows = Sequence[Mapping[str, Any]]


def matrices(rows: Rows) -> str:
    """Rows that `compare.differing` made, as symmetric matrices: one a case, number of steps and quantity.

    A cell is shaded by the logarithm of its count, in parts of that of all elements. Moments are folded away.
    """
    names = list(dict.fromkeys(name for row in rows for name in (row["data"]["other"], row["backend"])))
    if len(names) <= 2:
        return _one_pair(rows, names) if rows else ""
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["steps"], row["quantity"]), []).append(row)
    shown = [_matrix(*key, members) for key, members in groups.items() if key[2] == "parameter"]
    folded = [_matrix(*key, members) for key, members in groups.items() if key[2] != "parameter"]
    text = f'<div class="matrices">{"".join(shown)}</div>'
    if folded:
        inner = f'<div class="matrices">{"".join(folded)}</div>'
        text += f"<details><summary>Moments: {len(folded)} matrices</summary>{inner}</details>"
    return text


def _matrix(case: str, steps: int, quantity: str, rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in (row["data"]["other"], row["backend"])))
    counts = {frozenset((row["data"]["other"], row["backend"])): row["data"] for row in rows}
    lines = [[Cell(one), *(_cell(counts.get(frozenset((one, other)))) for other in names)] for one in names]
    elements = max(row["data"]["elements"] for row in rows)
    caption = f"{case}, {quantity}, after {steps}: of {elements} elements differ"
    return f"<div>{table(('backend', *names), lines, caption)}</div>"


def _one_pair(rows: Rows, names: Sequence[str]) -> str:
    lines = [
        [
            Cell(row["case"]),
            Cell(str(row["steps"])),
            Cell(row["quantity"], "text"),
            _cell(row["data"]),
            Cell(str(row["data"]["elements"])),
        ]
        for row in rows
    ]
    caption = f"Elements whose bits differ between {' and '.join(names)}"
    return table(("case", "steps", "quantity", "differ", "of"), lines, caption, tall=True)


def _cell(data: Mapping[str, Any] | None) -> Cell:
    if data is None:
        return Cell("")
    share = math.log1p(data["differing"]) / math.log1p(data["elements"]) if data["elements"] else 0.0
    return Cell(str(data["differing"]), share=share)
