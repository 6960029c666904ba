"""``penstock parity``: every case on every backend, against the float64 reference."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from typing import Any

from .. import __version__
from ..core.errors import InvalidArgumentError, PenstockError, RefusedError
from . import refuse, require

WIDTH = 200  # characters, if the output is not a terminal


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "parity",
        help="compare every backend with the float64 reference",
        description="Run every case on every backend, compare each with the float64 reference, and print the errors with "
        "their bounds. Exit status: 0 when every bound holds, 1 when one is broken, 2 on bad usage or when the report "
        "cannot be written.",
    )
    parser.add_argument("--backend", action="append", metavar="NAME", help="only this backend; may be repeated")
    parser.add_argument(
        "--cases",
        metavar="PATTERN",
        help="only cases that match, as 'B/*/bfloat16/*', that have this part, as 'adamw', or of this section, as 'events'",
    )
    parser.add_argument(
        "--import",
        action="append",
        dest="modules",
        default=[],
        metavar="MODULE",
        help="import this module first, which registers optimizers of yours; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="1 and 100 steps, not 2000, fewer cases, and no compiler")
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        metavar="DIR",
        help="write parity.json with every number there, and a page of them, parity.html",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the suite; 0, 1 when a bound is broken, 2 on bad usage or without the report."""
    try:
        return _run(arguments)
    except PenstockError as error:
        return refuse("parity", str(error))


def _run(arguments: argparse.Namespace) -> int:
    require("rich", "ml_dtypes", *(["matplotlib", "jinja2"] if arguments.report is not None else []))
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..parity import backends, report
    from ..parity.cases import QUICK_STEP_COUNTS, STEP_COUNTS
    from ..parity.report import terminal
    from ..parity.sections import select
    from ..parity.suite import run_sections

    for module in arguments.modules:
        _import(module)
    cases = select(arguments.cases, quick=arguments.quick)
    if arguments.report is not None:
        report.prepare(arguments.report)
    chosen, not_available = backends.choose(arguments.backend, quick=arguments.quick)

    columns = (TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=sum(len(of_section) for _, of_section in cases))
        begun: set[str] = set()

        def advance(case_name: str, part: str) -> None:
            begun.add(case_name)
            progress.update(task, completed=len(begun) - 1, description=f"{case_name} {part}")

        result = run_sections(chosen, cases, QUICK_STEP_COUNTS if arguments.quick else STEP_COUNTS, advance)

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if not result.rows:
        raise RefusedError("the backends refuse every one of these cases; choose others with --backend or --cases.")
    for table in terminal.tables(result):
        console.print(table)
    for name, reason in not_available.items():
        console.print(f"{name} did not run: {reason}", markup=False)
    for sentence in terminal.summary(result):
        console.print(sentence, markup=False, soft_wrap=True)
    if arguments.report is not None:
        content = report.document(result, version=__version__, command=["penstock", *sys.argv[1:]], not_available=not_available)
        for written in (report.write_json(arguments.report, content), report.write_page(arguments.report, content)):
            console.print(f"written: {written}", markup=False, soft_wrap=True)
    return 1 if result.broken else 0


def _import(module: str) -> None:
    """Import a module of the user, also from the working directory, as `python -m` does."""
    here = str(pathlib.Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidArgumentError(f"--import {module!r}: it cannot be imported: {reason}") from error
