"""The ``penstock`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from . import __version__

COMMANDS = ("demo", "parity", "plan", "convert", "combinations")
"""Modules of `penstock.commands`, each with `add_parser(subparsers)` and `run(arguments) -> int`."""


class Parser(argparse.ArgumentParser):
    """A parser that reports bad usage in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: what follows ``penstock``; None takes the process's own.
    """
    parser = Parser(prog="penstock", description="Each gradient is used the moment it exists, and is then gone.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, Any] = {name: import_module(f".commands.{name}", __package__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    return modules[parsed.command].run(parsed)


if __name__ == "__main__":
    sys.exit(main())
