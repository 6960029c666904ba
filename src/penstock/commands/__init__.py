"""The commands: they parse arguments, call the other packages, and print."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from importlib.util import find_spec

from ..core.errors import not_installed


def refuse(command: str, sentence: str) -> int:
    """Print on standard error why a command cannot do what was asked, and return its exit status, 2."""
    print(f"penstock {command}: {sentence}", file=sys.stderr)
    return 2


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int]) -> str:
    """Return rows as lines with columns of equal width, the first row underlined. A heading may have several lines.

    Args:
        rows: the headings, and equally many cells in each other row.
        left: numbers of the columns that are aligned on the left; all others are numbers.
    """
    stacked = [cell.split("\n") for cell in rows[0]]
    height = max(map(len, stacked))
    headings = list(zip(*([""] * (height - len(lines)) + lines for lines in stacked), strict=True))
    widths = [max(map(len, column)) for column in zip(*headings, *rows[1:], strict=True)]
    formats = "  ".join(f"{{:{'<' if number in left else '>'}{width}}}" for number, width in enumerate(widths))
    lines = [*headings, ["-" * width for width in widths], *rows[1:]]
    return "\n".join(formats.format(*line).rstrip() for line in lines)


def require(*modules: str, extra: str = "parity") -> None:
    """Raise unless the packages of a command are installed.

    Args:
        modules: their names.
        extra: the extra of penstock that brings them.

    Raises:
        MissingDependencyError: some are not.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise not_installed("this command", " and ".join(missing), extra)
