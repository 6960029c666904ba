"""`penstock bench` runs, small: every section measures its rows, what cannot run is named, and the figure shows the JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import resident
from benchmarks.bench import figure, torch_methods
from benchmarks.methods import METHODS

from penstock.__main__ import main
from penstock.commands import bench

HOOKS, OURS, ABSENT = "torch AdamW fused in hooks", "penstock AdamW release, default", "FlashOptim AdamW release"
COMPACT, SMALLEST = "penstock AdamW release, compact", "penstock AdamW release, smallest"
BYTES = {"parameter_bytes": 400, "above_model_bytes": 800, "state_bytes": 800}


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *sections: str) -> dict[str, Any]:
    monkeypatch.setattr(torch_methods, "NAMES", (HOOKS, OURS, ABSENT))
    monkeypatch.setitem(sys.modules, "flashoptim", None)
    assert main(["bench", "--quick", "--out", str(out), *(f"--section={name}" for name in sections)]) == 0
    result: dict[str, Any] = json.loads((out / "bench.json").read_text())
    assert {"versions", "machine", "command", "date", *sections} <= set(result)
    return result


def test_every_method_is_measured_or_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(monkeypatch, tmp_path, "time", "error")
    assert result["skipped"] == {ABSENT: "flashoptim is not installed"}
    assert set(result["time"]["rows"]) == {HOOKS, OURS}
    assert all(row["step_ms"] > 0 and row["first_ms"] > 0 for row in result["time"]["rows"].values())
    ours, theirs = (result["error"]["rows"][name] for name in (OURS, HOOKS))
    assert ours["fp32"] <= theirs["fp32"]
    assert ours["bf16"] < theirs["bf16"] / 100  # the lost bits are kept
    printed = capsys.readouterr().out
    assert OURS in printed
    assert f"{ABSENT} did not run: flashoptim is not installed" in printed
    assert not (tmp_path / "bench.png").exists()


def test_the_figure_shows_the_memory_and_the_losses_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "measure", lambda names, dtypes, model: {dtype: {OURS: BYTES} for dtype in dtypes})
    monkeypatch.setattr(figure, "ROWS", (("wide", OURS, "fp32", "#000000"), ("low", OURS, "bf16", "#000000")))
    monkeypatch.setattr(figure, "PAIRS", ((OURS, "fp32"), (OURS, "bf16"), (HOOKS, "fp32")))
    result = run(monkeypatch, tmp_path, "memory", "loss")
    assert set(result["loss"]["rows"]) == {f"{OURS}, fp32", f"{OURS}, bf16", f"{HOOKS}, fp32"}
    assert result["loss"]["rows"][f"{OURS}, fp32"] == result["loss"]["rows"][f"{HOOKS}, fp32"][:1] + [
        pytest.approx(loss, rel=1e-4) for loss in result["loss"]["rows"][f"{HOOKS}, fp32"][1:]
    ]
    shown = figure.drawn(result)
    assert {label: row["bytes"] for label, row in shown.items()} == {
        "wide": 12.0,
        "low": 6.0,
    }  # 4 and 2 for the parameter, and twice that above
    assert figure.digest(result).encode() in (tmp_path / "bench.png").read_bytes()


def test_a_coded_method_has_an_error_where_the_suite_can_read_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_methods, "NAMES", (COMPACT, SMALLEST))
    rows = torch_methods.errors(quick=True)["rows"]
    assert rows[COMPACT] == {}
    assert 0 < rows[SMALLEST]["bf16"] < 0.01


def test_jax_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optax")
    from benchmarks.bench import jax_methods

    steps = ("scan, remat", "optax.adamw"), ("none of jax's", "optax.adamw")
    monkeypatch.setattr(jax_methods, "ROWS", dict.fromkeys(steps, "optax"))
    result = run(monkeypatch, tmp_path, "jax")
    [row] = result["jax"]["rows"].values()
    assert row["state_bytes"] == pytest.approx(2 * row["parameter_bytes"], abs=100)
    assert row["peak_bytes"] >= row["parameter_bytes"] + row["state_bytes"]
    assert row["step_ms"] > 0
    assert list(result["skipped"]) == ["none of jax's, optax.adamw"]


def test_every_row_is_a_method() -> None:
    from benchmarks.bench.run import SECTIONS

    assert {*torch_methods.NAMES} <= set(METHODS)
    assert all(name in torch_methods.NAMES and dtype in METHODS[name].dtypes for name, dtype in figure.PAIRS)
    assert tuple(SECTIONS) == bench.SECTIONS


def test_outside_of_a_clone_it_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert main(["bench", "--out", str(tmp_path / "out")]) == 2
    wrong = capsys.readouterr().err
    assert wrong.startswith("penstock bench: the benchmarks are in the repository and not in the installed package; ")
    assert wrong.count("\n") == 1
    assert not (tmp_path / "out").exists()
