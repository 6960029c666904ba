"""The page: one HTML file from the document, made by the template `page.html.j2`. Nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import figures

Document = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it says.
        state: a class of the style: "bad", "beyond", "good", "soft", "text"; or none.
        link: the id of an element of the page.
        share: in [0, 1], how much the cell is shaded.
    """

    text: str
    state: str = ""
    link: str | None = None
    share: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, the first cell of each line its header. `tall`: it scrolls up and down by itself, with its header in place."""

    columns: Sequence[str]
    lines: Sequence[Sequence[Cell]]
    caption: str
    tall: bool = False

    @property
    def text_columns(self) -> set[int]:
        """The columns whose cells are text, not numbers."""
        return {0, *(place for line in self.lines[:1] for place, cell in enumerate(line) if cell.state == "text")}


def page(content: Document) -> str:
    """The page of a document, as `document.document` makes it or as the JSON file says it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    backends = [backend["name"] for backend in content["backends"]]
    peers = {backend["name"] for backend in content["backends"] if backend["peer"]}
    return environment.get_template("page.html.j2").render(
        content=content,
        headline=_headline(content),
        summary=_summary(content, backends),
        peers=[name for name in backends if name in peers],
        broken=_broken(content, peers),
        figures=[(each, base64.b64encode(each.svg).decode()) for each in figures(content)],
        sections=[_section(section, backends, peers) for section in content["sections"]],
        circumstances={
            "penstock": content["penstock"],
            "command": shlex.join(content["command"]),
            "seconds": f"{content['seconds']:.1f}",
            **content["device"],
            **{name: version or "not installed" for name, version in content["versions"].items()},
        },
    )


def _headline(content: Document) -> str:
    own = [verdict for section in content["sections"] for verdict in section["verdicts"] if not verdict["peer"]]
    judged = sum(verdict["judged"] for verdict in own)
    if content["broken"]:
        return f"{content['broken']} of {judged} comparisons break their bounds"
    return f"all {judged} comparisons are within their bounds" if judged else "nothing was compared with a bound"


def _summary(content: Document, backends: Sequence[str]) -> Table:
    lines = []
    for section in content["sections"]:
        by_name = {verdict["backend"]: verdict for verdict in section["verdicts"]}
        cells = [Cell(section["name"], link=f"section-{section['name']}"), *(_verdict(by_name.get(name)) for name in backends)]
        lines.append([*cells, Cell(f"{sum(section['seconds'].values()):.1f}")])
    seconds = [sum(section["seconds"].get(name, 0.0) for section in content["sections"]) for name in backends]
    lines.append([Cell("seconds"), *(Cell(f"{each:.1f}") for each in [*seconds, content["seconds"]])])
    return Table(["section", *backends, "seconds"], lines, "Verdict of each section and backend")


def _verdict(verdict: Mapping[str, Any] | None) -> Cell:
    if verdict is None:
        return Cell("-", "soft")
    if not verdict["judged"]:
        return Cell(str(verdict["comparisons"]), "soft")
    if verdict["beyond"]:
        word = "beyond" if verdict["peer"] else "broken"
        return Cell(f"{verdict['beyond']} of {verdict['judged']} {word}", "beyond" if verdict["peer"] else "bad")
    return Cell(f"{verdict['judged']} · {_number(verdict['largest_ratio'])}", "good")


def _broken(content: Document, peers: set[str]) -> Table | None:
    """Every broken row; None where there is none."""
    columns = ("case", "backend", "steps", "quantity", "relative error", "bound", "worst element, units", "bound", "failure")
    lines = [
        [
            Cell(row["case"], "bad"),
            Cell(row["backend"], "text"),
            Cell(str(row["steps"])),
            Cell(row["quantity"], "text"),
            *(Cell(_number(row[name])) for name in ("relative_error", "relative_bound", "units", "units_bound")),
            Cell(row["failure"] or "", "text"),
        ]
        for section in content["sections"]
        for row in section["rows"]
        if row["within"] is False and row["backend"] not in peers
    ]
    return Table(columns, lines, "Every broken row", tall=True) if lines else None


def _section(section: Mapping[str, Any], backends: Sequence[str], peers: set[str]) -> dict[str, Any]:
    """What the template shows of a section: matrices of differing elements, a table of errors, what was not run."""
    judged = [row for row in section["rows"] if row["within"] is not None]
    present = [name for name in backends if any(row["backend"] == name for row in judged)]
    lines = sorted(_lines(judged, present, peers), key=lambda line: line[0].state != "bad")
    refused = [
        [Cell(line["backend"]), Cell(str(line["cases"])), Cell(line["first"], "text"), Cell(line["reason"], "text")]
        for line in section["refused"]
    ]
    caption = "Relative error, and the error in parts of its bound (the largest of all quantities); what is broken first"
    return {
        "name": section["name"],
        "title": section["title"],
        "matrices": _matrices([row for row in section["rows"] if row["data"] and "differing" in row["data"]]),
        "errors": Table(["case", "steps", *present], lines, caption, tall=True) if lines else None,
        "refused": Table(("backend", "cases", "such as", "why"), refused, "What was not run") if refused else None,
    }


def _lines(rows: Sequence[Row], backends: Sequence[str], peers: set[str]) -> Iterator[list[Cell]]:
    """One line a case and number of steps: a cell a backend, of its worst quantity."""
    grouped: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["steps"]), {}).setdefault(row["backend"], []).append(row)
    for (case, steps), by_backend in grouped.items():
        cells = [_errors(by_backend.get(name, []), name in peers) for name in backends]
        state = "bad" if any(cell.state == "bad" for cell in cells) else ""
        yield [Cell(case, state), Cell(str(steps)), *cells]


def _errors(rows: Sequence[Row], peer: bool) -> Cell:
    if not rows:
        return Cell("-", "soft")
    worst = max(rows, key=lambda row: math.inf if row["ratio"] is None else row["ratio"])
    state = "" if all(row["within"] for row in rows) else "beyond" if peer else "bad"
    if worst["failure"] is not None:
        return Cell("raised", state)
    first = next((row for row in rows if row["quantity"] == "parameter"), worst)
    return Cell(f"{_number(first['relative_error'])} · {_number(worst['ratio'])}", state)


def _matrices(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """How many elements differ between each pair of backends, by quantity: a matrix a case, or one table of a single pair.

    Rows are those of `compare.differing`. A cell is shaded by the logarithm of its count, in parts of that of all elements.
    """
    names = list(dict.fromkeys(name for row in rows for name in (row["data"]["other"], row["backend"])))
    if len(names) == 2:
        lines = [
            [
                Cell(row["case"]),
                Cell(str(row["steps"])),
                Cell(row["quantity"], "text"),
                _count(row["data"]),
                Cell(str(row["data"]["elements"])),
            ]
            for row in rows
        ]
        caption = f"Elements whose bits differ between {' and '.join(names)}"
        return [("parameter", Table(("case", "steps", "quantity", "differ", "of"), lines, caption, tall=True))]
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["steps"], row["quantity"]), []).append(row)
    return [(quantity, _matrix(case, steps, quantity, members)) for (case, steps, quantity), members in groups.items()]


def _matrix(case: str, steps: int, quantity: str, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in (row["data"]["other"], row["backend"])))
    counts = {frozenset((row["data"]["other"], row["backend"])): row["data"] for row in rows}
    lines = [[Cell(one), *(_count(counts.get(frozenset((one, other)))) for other in names)] for one in names]
    elements = max(row["data"]["elements"] for row in rows)
    return Table(("backend", *names), lines, f"{case}, {quantity}, after {steps}: of {elements} elements differ")


def _count(data: Mapping[str, Any] | None) -> Cell:
    if data is None:
        return Cell("")
    share = math.log1p(data["differing"]) / math.log1p(data["elements"]) if data["elements"] else 0.0
    return Cell(str(data["differing"]), share=share)


def _number(value: float | None) -> str:
    """Two digits; None in the document is a number that is not finite."""
    if value is None:
        return "not finite"
    return f"{value:.2g}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.1e}"
