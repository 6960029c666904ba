"""The benchmark of resident memory runs, small, one process a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from benchmarks import resident
from benchmarks.llama import LLAMA_290M, TINY, tied_llama
from benchmarks.methods import METHODS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_row_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "resident.json"
    rows = ["penstock AdamW release, eager"]
    resident.main(["--model", "tiny", "--dtypes", "bf16", "--out", str(path), "--rows", *rows])
    result = json.loads(path.read_text())
    assert {"versions", "machine", "command", "settings", "goals"} <= set(result)
    assert list(result["rows"]["bf16"]) == rows
    row = result["rows"]["bf16"][rows[0]]
    assert row["parameter_bytes"] == 2 * sum(p.numel() for p in tied_llama(TINY).parameters())
    assert not row["compiled"]
    assert 4 <= row["state_bytes"] / (row["parameter_bytes"] / 2) < 9  # split, two moments, and a count for each tensor


def test_the_rows_that_are_compared_exist() -> None:
    assert {name for _, *names, _ in resident.GOALS for name in names} <= set(resident.USUAL) <= set(METHODS)


def test_the_model_is_the_one_of_182_tensors() -> None:
    assert LLAMA_290M.parameters - LLAMA_290M.vocabulary * LLAMA_290M.width == 289_711_104  # the head is tied
    assert len(list(tied_llama(TINY).parameters())) == 9 * TINY.layers + 2
    assert 9 * LLAMA_290M.layers + 2 == 182
