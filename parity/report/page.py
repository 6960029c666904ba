"""The page: one HTML file from the document, figures inside, nothing loaded from elsewhere."""

from __future__ import annotations

import shlex
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from . import figures
from .markup import Cell, table
from .matrices import matrices
from .template import PAGE, STYLE

Document = Mapping[str, Any]
Section = Mapping[str, Any]


def page(content: Document) -> str:
    """The page of a document, as `document.document` makes it or as the JSON file says it."""
    headline = _headline(content)
    pieces = [_header(content, headline), _summary(content), _broken(content), _figures(content)]
    pieces += [_section(section, content) for section in content["sections"]]
    pieces.append(_circumstances(content))
    return string.Template(PAGE).substitute(headline=escape(headline), style=STYLE, body="\n".join(filter(None, pieces)))


def _headline(content: Document) -> str:
    own = [verdict for section in content["sections"] for verdict in section["verdicts"] if not verdict["peer"]]
    judged = sum(verdict["judged"] for verdict in own)
    if content["broken"]:
        return f"{content['broken']} of {judged} comparisons break their bounds"
    return f"all {judged} comparisons are within their bounds" if judged else "nothing was compared with a bound"


def _header(content: Document, headline: str) -> str:
    state = "bad" if content["broken"] else "good"
    links = [("summary", "Summary"), *((f"section-{section['name']}", section["name"]) for section in content["sections"])]
    links.append(("circumstances", "Circumstances"))
    items = "".join(f'<li><a href="#{escape(target)}">{escape(text)}</a></li>' for target, text in links)
    return (
        "<header><h1>penstock parity</h1>"
        f'<p class="verdict {state}">{"&#10007;" if content["broken"] else "&#10003;"} {escape(headline)}.</p></header>'
        f'<nav aria-label="Sections"><ul>{items}</ul></nav>'
    )


def _summary(content: Document) -> str:
    backends = _backends(content)
    lines = []
    for section in content["sections"]:
        by_name = {verdict["backend"]: verdict for verdict in section["verdicts"]}
        seconds = sum(section["seconds"].values())
        cells = [Cell(section["name"], link=f"section-{section['name']}")]
        lines.append([*cells, *(_verdict(by_name.get(name)) for name in backends), Cell(f"{seconds:.1f}")])
    seconds_of = [sum(section["seconds"].get(name, 0.0) for section in content["sections"]) for name in backends]
    total = Cell(f"{content['seconds']:.1f}")
    lines.append([Cell("seconds"), *(Cell(f"{seconds:.1f}") for seconds in seconds_of), total])
    peers = [name for name in backends if name in _peers(content)]
    note = (
        "Comparisons, and the largest error in parts of its bound: up to 1 it is within. Cells without a second figure are "
        "for information. "
    )
    if peers:
        note += f"For comparison only, not judged: {', '.join(peers)}."
    made = table(["section", *backends, "seconds"], lines, "Verdict of each section and backend")
    missing = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in content["not_available"].items())
    missing = f"<p>Not run:</p><ul>{missing}</ul>" if missing else ""
    return f'<section id="summary"><h2>Summary</h2>{made}<p class="soft">{escape(note)}</p>{missing}</section>'


def _verdict(verdict: Mapping[str, Any] | None) -> Cell:
    if verdict is None:
        return Cell("-", "soft")
    if not verdict["judged"]:
        return Cell(str(verdict["comparisons"]), "soft")
    if verdict["beyond"]:
        word = "beyond" if verdict["peer"] else "broken"
        return Cell(f"{verdict['beyond']} of {verdict['judged']} {word}", "beyond" if verdict["peer"] else "bad")
    return Cell(f"{verdict['judged']} · {_number(verdict['largest_ratio'])}", "good")


BROKEN_COLUMNS = ("case", "backend", "steps", "quantity", "relative error", "bound", "worst element, units", "bound", "failure")


def _broken(content: Document) -> str:
    """Every broken row; nothing where none is."""
    peers = _peers(content)
    rows = [row for row in _rows(content) if row["within"] is False and row["backend"] not in peers]
    if not rows:
        return ""
    lines = [
        [
            Cell(row["case"], "bad"),
            Cell(row["backend"], "text"),
            Cell(str(row["steps"])),
            Cell(row["quantity"], "text"),
            *(Cell(_number(row[name])) for name in ("relative_error", "relative_bound", "units", "units_bound")),
            Cell(row["failure"] or "", "text"),
        ]
        for row in rows
    ]
    return f'<section id="broken"><h2>What broke</h2>{table(BROKEN_COLUMNS, lines, "Every broken row", tall=True)}</section>'


def _figures(content: Document) -> str:
    rows, backends = list(_rows(content)), _backends(content)
    updates = [row for section in content["sections"] if section["name"] == "updates" for row in section["rows"]]
    drawn = (
        ("How near the bounds", figures.ratios(rows, backends), "One dot a comparison, at its error in parts of its bound."),
        (
            "Errors over the steps",
            figures.growth(updates, backends),
            "Relative error of the parameters with their compensation against the number of steps; of each dtype and "
            "compensation one case, that which most backends have run.",
        ),
        (
            "Live gradient bytes",
            figures.live_bytes(rows),
            "What the ledger says is alive at the peak, and what was measured by storage; and what was alive whenever a "
            "gradient arrived.",
        ),
    )
    made = [
        f'<figure><h3>{title}</h3><div class="drawing">{image}</div><figcaption>{caption}</figcaption></figure>'
        for title, image, caption in drawn
        if image is not None
    ]
    return f'<section id="figures"><h2>Figures</h2>{"".join(made)}</section>' if made else ""


def _section(section: Section, content: Document) -> str:
    judged = [row for row in section["rows"] if row["within"] is not None]
    pieces = [f"<h2>{escape(section['name'])}</h2><p>{escape(section['title'])}.</p>"]
    pieces.append(matrices([row for row in section["rows"] if row["data"] and "differing" in row["data"]]))
    if judged:
        present = [name for name in _backends(content) if any(row["backend"] == name for row in judged)]
        lines = sorted(_lines(judged, present, _peers(content)), key=lambda line: line[0].state != "bad")
        caption = "Relative error, and the error in parts of its bound (the largest of all quantities); what is broken first"
        made = table(["case", "steps", *present], lines, caption, tall=True)
        pieces.append(f"<details open><summary>{len(lines)} lines</summary>{made}</details>" if len(lines) > 40 else made)
    if section["refused"]:
        refused = [
            [Cell(line["backend"]), Cell(str(line["cases"])), Cell(line["first"], "text"), Cell(line["reason"], "text")]
            for line in section["refused"]
        ]
        made = table(("backend", "cases", "such as", "why"), refused, "What was not run")
        pieces.append(f"<details><summary>Not run, by reason: {len(refused)}</summary>{made}</details>")
    return f'<section id="section-{escape(section["name"])}">{"".join(pieces)}</section>'


def _lines(rows: Sequence[Mapping[str, Any]], backends: Sequence[str], peers: set[str]) -> Iterator[list[Cell]]:
    """One line a case and number of steps: a cell a backend, of its worst quantity."""
    grouped: dict[tuple[str, int], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["steps"]), {}).setdefault(row["backend"], []).append(row)
    for (case, steps), by_backend in grouped.items():
        cells = [_errors(by_backend.get(name, []), name in peers) for name in backends]
        state = "bad" if any(cell.state == "bad" for cell in cells) else ""
        yield [Cell(case, state), Cell(str(steps)), *cells]


def _errors(rows: Sequence[Mapping[str, Any]], peer: bool) -> Cell:
    if not rows:
        return Cell("-", "soft")
    worst = max(rows, key=lambda row: float("inf") if row["ratio"] is None else row["ratio"])
    state = "" if all(row["within"] for row in rows) else "beyond" if peer else "bad"
    if worst["failure"] is not None:
        return Cell("raised", state)
    first = next((row for row in rows if row["quantity"] == "parameter"), worst)
    return Cell(f"{_number(first['relative_error'])} · {_number(worst['ratio'])}", state)


def _circumstances(content: Document) -> str:
    entries: list[tuple[str, Any]] = [("penstock", content["penstock"]), ("command", shlex.join(content["command"]))]
    entries.append(("seconds", f"{content['seconds']:.1f}"))
    entries += [(name, value) for name, value in content["device"].items()]
    entries += [(name, value or "not installed") for name, value in content["versions"].items()]
    items = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in entries)
    return f'<section id="circumstances"><h2>Circumstances</h2><dl>{items}</dl></section>'


def _backends(content: Document) -> list[str]:
    return [backend["name"] for backend in content["backends"]]


def _peers(content: Document) -> set[str]:
    return {backend["name"] for backend in content["backends"] if backend["peer"]}


def _rows(content: Document) -> Iterable[Mapping[str, Any]]:
    return (row for section in content["sections"] for row in section["rows"])


def _number(value: float | None) -> str:
    """Two digits; null in the document is no finite number."""
    if value is None:
        return "not finite"
    return f"{value:.2g}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.1e}"
