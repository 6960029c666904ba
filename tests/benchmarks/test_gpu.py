"""The GPU script runs where there is no GPU, small: nothing of it is untried when there is one for a few minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def dry(directory: Path, *sections: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    done = run("--out", str(directory), "--dry", *(("--sections", *sections) if sections else ()))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((directory / "gpu.json").read_text())
    assert {"versions", "device", "command"} <= set(result)
    assert result["failed"] == {}
    assert set(result["seconds"]) == set(result["sections"])
    assert all(section.get("holds", True) for section in result["sections"].values())
    return result


def test_chosen_sections_run_dry(tmp_path: Path) -> None:
    """Those that the pretended device leaves out."""
    assert set(dry(tmp_path, "one_tensor", "jax")["sections"]) == {"one_tensor", "jax"}


@pytest.mark.exhaustive
def test_every_section_runs_dry(tmp_path: Path) -> None:
    sections = dry(tmp_path)["sections"]
    assert {"soak", "one_tensor", "step_time", "graph", "release", "parity"} <= set(sections)
    assert all("ratio_to_floor" in row for row in sections["step_time"]["rows"])
    assert set(sections["step_time"]["goals"]) >= {"1B fp32", "124M bf16+split"}


def test_without_a_device_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # set by the script, for its own process
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        main(["--out", str(tmp_path)])
    assert raised.value.code == 2
    assert "--dry" in capsys.readouterr().err


def test_every_section_runs_as_on_a_device() -> None:
    """Not one of the lines that a dry run leaves out is tried for the first time on a device that is lent for minutes."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.fake_device"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert all(section.get("holds", True) for section in results.values()), results
    assert results["device"]["cache_bytes"] == 2**16
    assert {"launched", "replayed"} <= set(results["graph"])
    assert results["release"]["released"]["peak_bytes"] == 1
    changes = [set(row["change"]) for row in results["configurations"]["rows"]]
    assert {"registers", "programs"} in changes
    step_time = results["step_time"]
    assert not any("failed" in row for row in step_time["rows"] if "optimi" not in row["optimizer"])
    named = {row["optimizer"] for row in step_time["rows"]} | set(step_time["absent"])
    assert {"optimi StableAdamW", "FlashOptim AdamW", "torchao AdamW8bit", "torch AdamW(fused=True)"} <= named
