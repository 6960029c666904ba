"""The benchmark of codings runs, small, in both frameworks, and its law fails where the losses differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import pages
from benchmarks.codings import figure
from benchmarks.codings.__main__ import main
from benchmarks.codings.rows import LIMIT, ROWS
from benchmarks.codings.verdicts import differences, goals

SMALLEST, LOSES = "stochastic, 8-bit states (smallest)", "no compensation"


def run(out: Path, *arguments: str) -> dict[str, Any]:
    main(["--quick", "--seeds", "1", "--out", str(out), *arguments])
    result: dict[str, Any] = json.loads((out / "codings.json").read_text())
    assert {"versions", "machine", "command", "date", "settings", "goals"} <= set(result)
    return result


def test_both_frameworks_train_from_one_start_and_go_on_where_they_were(tmp_path: Path) -> None:
    result = run(tmp_path, "--rows", SMALLEST)
    assert {framework: list(rows) for framework, rows in result["losses"].items()} == {
        framework: ["float32", SMALLEST] for framework in ("torch", "jax")
    }
    torch, jax = (result["losses"][framework]["float32"]["0"] for framework in ("torch", "jax"))
    assert torch == pytest.approx(jax, rel=1e-5)
    assert figure.digest(result).encode() in (tmp_path / "codings.png").read_bytes()
    result["losses"]["torch"][SMALLEST]["0"] = 7.0  # not trained again
    (tmp_path / "codings.json").write_text(json.dumps(result))
    again = run(tmp_path, "--rows", "Lion, smallest", "--frameworks", "torch")
    assert again["losses"]["torch"][SMALLEST] == {"0": 7.0}
    assert {"Lion, float32", "Lion, smallest"} <= set(again["losses"]["torch"])


def test_muon_trains_in_both_frameworks(tmp_path: Path) -> None:
    result = run(tmp_path, "--rows", "Muon, float32")
    torch, jax = (result["losses"][framework]["Muon, float32"]["0"] for framework in ("torch", "jax"))
    assert torch == pytest.approx(jax, rel=1e-3)  # its iterations are in bfloat16


@pytest.mark.parametrize(("smallest", "loses", "met"), [(0.5, 2.0, [True, True]), (-2.0, 0.5, [False, False])])
def test_the_law_is_of_the_mean_and_wants_to_see_a_difference(smallest: float, loses: float, met: list[bool]) -> None:
    rows = {"float32": {"0": 2.0, "1": 3.0}}
    for name, off in {SMALLEST: smallest, LOSES: loses}.items():
        rows[name] = {"0": 2.0 + 2.0 * off * LIMIT, "1": 3.0}
    assert [goal.met for goal in goals({"torch": rows})] == met
    assert differences({"torch": rows}, "torch", LOSES) == [pytest.approx(2.0 * loses * LIMIT), 0.0]


def test_every_row_is_compared_with_one_in_float32() -> None:
    for row in ROWS.values():
        base = ROWS[row.base] if row.base else row
        assert base.base is None
        assert (base.dtype, base.optimizer, base.asked) == ("float32", row.optimizer, {})


def test_the_figure_of_the_page_shows_the_results() -> None:
    picture = (pages.DOCS / pages.CODINGS_PNG).read_bytes()
    assert figure.digest(pages.result("codings")).encode() in picture, "make it again: python -m benchmarks.pages"
