"""``penstock bench``: penstock beside its peers on this machine. What it measures is in `benchmarks/`, of a clone."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from types import ModuleType
from typing import Any

from ..core.errors import MissingDependencyError, PenstockError
from . import refuse, require

ROOT = pathlib.Path(__file__).resolve().parents[3]
SECTIONS = ("memory", "time", "error", "loss", "jax")


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="memory, time and error beside torch, optimi, torchao, bitsandbytes and Optax, on this machine",
        description="Train by every method that is installed and runs here, and print peak memory, bytes of state, times and "
        "the error against float64; write them as JSON with versions and machine, and draw a figure. What does not run is "
        "named with the reason. Takes less than ten minutes on two idle cores, and needs 4 GB and a clone of the repository. "
        "Exit status: 0, or 2 on bad usage.",
    )
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, metavar="NAME", help=f"only {', '.join(SECTIONS)}; may be repeated"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"), metavar="DIR", help="default: bench")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the command; the figures mean nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; 0, or 2 if it cannot."""
    try:
        require("rich", "matplotlib")
        benchmarks = _benchmarks()
        arguments.out.mkdir(parents=True, exist_ok=True)
        benchmarks.run(arguments.section or SECTIONS, arguments.out, quick=arguments.quick)
        return 0
    except PenstockError as error:
        return refuse("bench", str(error))
    except OSError as error:
        return refuse("bench", f"--out {str(arguments.out)!r}: {error.strerror or error}.")


def _benchmarks() -> ModuleType:
    """Import the benchmarks of the clone that this package is in."""
    if not (ROOT / "benchmarks" / "bench").is_dir():
        raise MissingDependencyError(
            "the benchmarks are in the repository and not in the installed package; run it in a clone: make bench."
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.bench.run")
