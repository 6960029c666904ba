"""The GPU stages run where there is no GPU, small: nothing of them is untried when there is one for a few minutes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.gpu.__main__ import FAILED, main, path_of, run_stages, work
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.tools import run_tool

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "torch AdamW(fused=True)",
    "optimi StableAdamW",
    "FlashOptim FlashAdamW",
    "torchao AdamW8bit",
    "bitsandbytes AdamW8bit",
}


def test_every_stage_runs_dry(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", *"1234567", "--out", str(tmp_path), "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {stage: json.loads(path_of(tmp_path, stage).read_text()) for stage in range(1, 8)}
    rows = {(stage, name): found["rows"] for stage in results for name, found in results[stage]["sections"].items()}
    assert all({"versions", "device", "command", "date"} <= set(result) for result in results.values())
    assert all(rows.values())
    failed = [row for found in rows.values() for row in found if "failed" in row]
    assert not failed
    assert {row["way"] for row in rows[2, "ways"]} >= {"ticketed", "pair", "measure only", "write only", "AdamW", "capturable"}
    for section in ("models", "optimizers"):  # never left out silently
        assert {row["optimizer"] for row in rows[4, section]} >= PEERS


def test_without_a_device_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")  # set by the script, for its own process
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert work([1], tmp_path, dry=False) == 2
    assert "--dry" in capsys.readouterr().err


def stage(*names: str, seconds: int = 60, stops: bool = False, holds: bool = True) -> Any:
    def rows(setting: Any) -> Iterator[dict[str, Any]]:
        yield {"holds": holds}
        yield {}

    sections = {name: SimpleNamespace(run=rows, stuck=60) for name in names}
    return SimpleNamespace(seconds=seconds, stops=stops, sections=sections)


HERE = mock.Mock(spec=Setting, dry=True, description=dict)


def test_a_process_goes_on_after_the_section_in_which_the_last_one_hung(tmp_path: Path) -> None:
    run_stages({2: stage("first")}, tmp_path, HERE)
    found = json.loads(path_of(tmp_path, 2).read_text())
    found["sections"]["hung"] = {"finished": False, "seconds": 60.0, "rows": [{"figure": 1}]}
    path_of(tmp_path, 2).write_text(json.dumps(found))
    assert run_stages({2: stage("first", "hung", "next")}, tmp_path, HERE) == FAILED
    sections = json.loads(path_of(tmp_path, 2).read_text())["sections"]
    assert sections["hung"]["rows"] == [{"figure": 1}]
    assert {name: "failed" in section for name, section in sections.items()} == {"first": False, "hung": True, "next": False}


def test_a_wrong_result_of_the_first_stage_ends_the_run_and_a_stage_ends_in_time(tmp_path: Path) -> None:
    assert run_stages({1: stage("steps", stops=True, holds=False), 2: stage("ways")}, tmp_path, HERE) == FAILED
    assert not path_of(tmp_path, 2).exists()
    assert run_stages({2: stage("ways", seconds=-1)}, tmp_path, HERE) == 0
    section = json.loads(path_of(tmp_path, 2).read_text())["sections"]["ways"]
    assert len(section["rows"]) == 1
    assert "left_out" in section


def test_a_run_is_repeated_until_it_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([1, -9, FAILED])
    monkeypatch.setattr(subprocess, "run", lambda command, check: SimpleNamespace(returncode=next(statuses)))
    assert main(["--stage", "1", "--out", str(tmp_path)]) == 1
    assert next(statuses, None) is None


def test_the_lines_that_a_dry_run_leaves_out_call_torch_cuda_as_it_is() -> None:
    """Each attribute of torch.cuda exists, and is called with arguments that it takes."""
    fake = mock.create_autospec(torch.cuda)
    fake.Event.return_value.elapsed_time.return_value = 1.0
    fake.stream = fake.graph = lambda _: contextlib.nullcontext()
    setting = Setting(dry=False)
    with mock.patch.object(torch, "cuda", fake), mock.patch.object(Setting, "device", "cpu"):
        with mock.patch("benchmarks.gpu.setting.FILLER_BYTES", 1):
            assert setting.device_ms(int, 2) == 1.0
        assert setting.wall_ms(int)["host_ms"] >= 0
        assert setting.captured(int) is fake.CUDAGraph.return_value.replay
        with setting.another_stream():
            pass
        setting.reset_peak()
        assert {"capability", "cache_bytes"} <= set(setting.description())
        assert "peak_reserved_bytes" in setting.peak()


def test_a_table_of_ncu_is_read() -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu.ratios import METRICS, metrics

    names, units = (",".join(f'"{cell}"' for cell in row) for row in (("ID", *METRICS), ("", "Gbyte", "Gbyte", "%", "us")))
    found = metrics(f'==PROF== Connected\n{names}\n{units}\n"0","1","2","3","4"\n"1","5","6","7","8"\n')
    assert found[0] == dict(zip(METRICS, ("1 Gbyte", "2 Gbyte", "3 %", "4 us"), strict=True))
    assert found[1] == dict(zip(METRICS, ("5 Gbyte", "6 Gbyte", "7 %", "8 us"), strict=True))
    assert metrics("==ERROR== no counters") == metrics(f"{names}\n{units}\n") == []


def test_a_tool_whose_time_runs_out_ends_with_what_it_has_started() -> None:
    """The child has the tool's pipes: who only killed the tool would wait for the child."""
    script = "import subprocess; subprocess.Popen(['sleep', '30']); print('begun', flush=True); import time; time.sleep(30)"
    ended = run_tool([sys.executable, "-c", script], 1.0)
    assert ended.status is None
    assert ended.stdout == "begun\n"
    assert "time ran out" in ended.last_words


def test_a_tool_tells_its_status_and_both_outputs() -> None:
    script = "import os, sys; print(os.environ['GIVEN']); print('error', file=sys.stderr); sys.exit(9)"
    assert run_tool([sys.executable, "-c", script], 30.0, GIVEN="given") == (9, "given\n", "error\n")


def test_an_error_that_ends_the_context_ends_the_section() -> None:
    assert Setting(dry=True).failure(ValueError("too large")) == "ValueError: too large"
    with (
        mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("CUDA error: an illegal memory access")),
        pytest.raises(RuntimeError, match="illegal"),
    ):
        Setting(dry=False).failure(ValueError("too large"))


def test_without_a_gpu_for_jax_the_walk_says_so() -> None:
    jax = pytest.importorskip("jax")
    from benchmarks.gpu.walk import jax_steps

    with mock.patch.object(jax, "default_backend", return_value="cpu"):
        (row,) = jax_steps(Setting(dry=False))
    assert "cpu" in row["missing"]


def test_optimizers_that_compile_come_last() -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu.peers import candidates
    from benchmarks.gpu.training import in_order

    pairs = [(candidate.name, model) for candidate, model in in_order(candidates(Setting(dry=True)), ("small", "large"))]
    assert all("torchao" in name for name, _ in pairs[-4:])
    assert pairs[0][1] == "small"
