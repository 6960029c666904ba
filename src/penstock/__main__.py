"""The ``penstock`` command."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO, TypeVar, cast

from . import __version__

T = TypeVar("T")
COMMANDS = ("demo", "parity", "plan", "bench", "convert", "combinations")
"""Modules of `penstock.commands`, each with `add_parser(subparsers)` and `run(arguments) -> int`."""


class Parser(argparse.ArgumentParser):
    """A parser that reports bad usage in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class Output:
    """Standard output that drops what nobody reads: the exit status of ``penstock parity | head`` is the verdict, too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        return self._unless_closed(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        """Flush, or drop."""
        self._unless_closed(self._stream.flush, None)

    def _unless_closed(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # what is buffered, and comes, goes there
            return otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: what follows ``penstock``; None takes the process's own.
    """
    parser = Parser(
        prog="penstock", description="Gradient release for PyTorch and JAX: the optimizer's step inside the backward pass."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, Any] = {name: import_module(f".commands.{name}", __package__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    with contextlib.redirect_stdout(cast(TextIO, Output(sys.stdout))):
        status: int = modules[parsed.command].run(parsed)
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
