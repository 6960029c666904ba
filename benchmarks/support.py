"""What the benchmarks share: their command lines, tables and goals, result files, and child processes."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.atomic_write import replacing

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "penstock",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "numpy",
    "triton",
    "torch-optimi",
    "flashoptim",
    "torchao",
    "bitsandbytes",
)


# -- command lines and tables -------------------------------------------------------------------------------------------


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints a module's docstring, line by line, as its help."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns, such as 'penstock*'."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def print_tables(tables: Iterable[Table], width: int = 120) -> None:
    """Print tables on stdout, so many columns wide if that is not a terminal."""
    from rich.console import Console  # a machine with a GPU may not have it, and needs none of these tables

    console = Console(width=None if sys.stdout.isatty() else width)
    for table in tables:
        console.print(table)


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a page; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows))


def failure(error: Exception) -> str:
    """Return the type and the first 30 words of an error's message."""
    return f"{type(error).__name__}: {' '.join(str(error).split()[:30])}"


class Goal(NamedTuple):
    """`what` is to be at most `at_most`; `measured` is None if a row that it needs was not measured."""

    what: str
    at_most: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if it was not measured."""
        return None if self.measured is None else self.measured <= self.at_most

    def as_json(self) -> dict[str, Any]:
        """Return the goal as an object for a result file."""
        return {**self._asdict(), "met": self.met}


def ratio(value: float | None, over: float | None) -> float | None:
    """Return value / over, or None if one of them was not measured."""
    return None if value is None or over is None else value / over


def goals_table(goals: Sequence[Goal]) -> Table:
    """Return a table with one line per goal: "goal 0.85, measured 2.1"."""
    from rich.table import Table

    table = Table("what", "goal", "measured", "met", title="goals")
    for goal in goals:
        measured = "-" if goal.measured is None else f"{goal.measured:.2f}"
        table.add_row(
            goal.what, f"goal {goal.at_most:g}", f"measured {measured}", {None: "-", True: "yes", False: "no"}[goal.met]
        )
    return table


# -- results ------------------------------------------------------------------------------------------------------------


def result(name: str) -> dict[str, Any]:
    """Return a result file of the repository."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, together with versions, machine, command and date; an existing file is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**circumstances(), **result}, indent=2) + "\n")


def circumstances() -> dict[str, Any]:
    """Return the installed versions, the processor, the number of cores, the command and the date."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    module = specification.name.removesuffix(".__main__") if specification else Path(sys.argv[0]).name
    return {
        "versions": _installed() | {"python": platform.python_version()},
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.system()},
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


@functools.cache
def _installed() -> dict[str, str]:
    """Return the installed versions; cached, because a search for metadata takes longer than a file's other contents."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor_name() -> str:
    """Return the processor's model name, or its architecture if the system does not tell the name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# -- child processes ----------------------------------------------------------------------------------------------------


def run_child(module: str, *arguments: str, **environment: str) -> Any:
    """Run `python -m module arguments...` in a fresh interpreter; return the last line of its output, parsed as JSON.

    The child imports from the same paths as this process, and gets `environment` in addition to its variables.

    Raises:
        RuntimeError: the child failed; the message ends with its stderr.
    """
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    command = [sys.executable, "-m", module, *arguments]
    variables = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
