"""Tables in HTML; every text is escaped here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: as it is, unescaped.
        state: a class of the style: "bad", "beyond", "good", "soft", "text"; or none.
        link: the id of an element of the page.
        share: in [0, 1], how much the cell is shaded.
    """

    text: str
    state: str = ""
    link: str | None = None
    share: float | None = None


def table(columns: Sequence[str], lines: Sequence[Sequence[Cell]], caption: str, *, tall: bool = False) -> str:
    """A table that scrolls by itself where it is wider than the page; the first cell of a line is its header.

    Args:
        columns: their headers; the first is that of the lines' headers.
        lines: cells, as many as columns.
        caption: what the table says.
        tall: whether it scrolls up and down, too, with its header in place.
    """
    texts = {0, *(place for place, cell in enumerate(lines[0]) if cell.state == "text")} if lines else {0}
    head = "".join(
        f'<th scope="col"{_class("text" if place in texts else "")}>{escape(name)}</th>' for place, name in enumerate(columns)
    )
    body = "".join(f"<tr>{_row_header(line[0])}{''.join(map(_cell, line[1:]))}</tr>" for line in lines)
    # keys must be able to scroll it
    return (
        f'<div class="scroll{" tall" if tall else ""}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row_header(cell: Cell) -> str:
    text = escape(cell.text) if cell.link is None else f'<a href="#{escape(cell.link)}">{escape(cell.text)}</a>'
    return f'<th scope="row"{_class(cell.state)}>{text}</th>'


def _cell(cell: Cell) -> str:
    if cell.share is not None:
        return f'<td class="share" style="--share: {cell.share:.2f}">{escape(cell.text)}</td>'
    return f"<td{_class(cell.state)}>{escape(cell.text)}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
