"""The host time of launches is measured where there is no GPU, and nothing but the launch is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_column_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.triton_host_time", "--tensors", "3", "--rounds", "2", "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["microseconds"]
    assert len(rows) == 4
    for row in rows:
        assert {"update", "front end", "update_all", "moved", "step", "release"} < set(row)
        assert row["update"] > 0
