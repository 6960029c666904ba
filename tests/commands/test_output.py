"""What the commands print: aligned tables, and a reader that has gone away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.commands import aligned

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "arguments",
    [["combinations"], ["parity", "--quick", "--backend", "numpy", "--cases", "B/adamw/float64/*"]],
    ids=lambda arguments: arguments[0],
)
def test_the_exit_status_is_the_verdict_although_nobody_reads_the_output(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [["name", "peak\nbytes"], ["a", "10"], ["longer", "7"]]
    assert aligned(rows, left=[0]).splitlines() == [
        "         peak",
        "name    bytes",
        "------  -----",
        "a          10",
        "longer      7",
    ]
