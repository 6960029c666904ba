"""``penstock combinations``: what goes together in PyTorch's gradient release, as a page."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from . import refuse


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "combinations",
        help="what is exact, approximate or refused with what",
        description="Print the table of combinations as Markdown, equal rows put together. Exit status: 0, or 2 if the file "
        "cannot be written.",
    )
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="write the page there instead")


def run(arguments: argparse.Namespace) -> int:
    """Print or write; 0, or 2 if it cannot be written."""
    from ..core.combinations_page import markdown

    if arguments.write is None:
        print(markdown(), end="")
        return 0
    try:
        arguments.write.write_text(markdown(), encoding="utf-8")
    except OSError as error:
        return refuse("combinations", f"--write {str(arguments.write)!r}: {error.strerror or error}.")
    return 0
