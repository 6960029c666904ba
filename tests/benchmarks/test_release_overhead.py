"""The benchmark of released steps runs, small: every row is there, and is compared with what it is said to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from benchmarks.release_overhead import host
from benchmarks.release_overhead.__main__ import main
from benchmarks.release_overhead.calls import calls_per_gradient, count_calls
from benchmarks.release_overhead.modes import MODES, OPTIMIZERS, row_name
from benchmarks.release_overhead.timing import Row, Seconds, Taken, figures
from benchmarks.release_overhead.workloads import TINY, WORKLOADS, Workload
from benchmarks.support import Goal

from penstock.torch_frontend import AdamW, StableAdamW


def run(path: Path, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--quick", "--rounds", "1", "--out", str(path)])
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"versions", "machine", "command", "settings", "goals"} <= set(result)
    return result


def test_every_row_is_timed(tmp_path: Path) -> None:
    result = run(tmp_path / "host.json", "--sections", "host", "calls")
    rows = result["host"]["tiny"]["rows"]
    ours = {
        f"penstock {rule} {kind}, {name}"
        for rule in OPTIMIZERS
        for kind in ("plain", "release")
        for name in ("default", "eager")
    }
    modes = {row_name(rule, mode.name) for rule in OPTIMIZERS for mode in MODES}
    assert ours | modes | {"torch AdamW fused plain", "torch AdamW foreach plain", host.IN_HOOKS, "bare"} <= set(rows)
    assert all("ratio_to_base" in rows[name] for name in modes)
    assert {goal["what"] for goal in result["goals"]} >= {f"tiny: {name} / default" for name in modes}
    assert set(result["calls"]) == set(OPTIMIZERS)


def test_chosen_rows_bring_what_they_are_compared_with(tmp_path: Path) -> None:
    result = run(tmp_path / "some.json", "--sections", "host", "--rows", "penstock AdamW release, guard")
    assert set(result["host"]["tiny"]["rows"]) == {
        "bare",
        "bare, 2 passes",
        "penstock AdamW release, default",
        "penstock AdamW release, guard",
    }


def test_two_processes_time_every_path(tmp_path: Path) -> None:
    result = run(tmp_path / "processes.json", "--sections", "processes")
    rows = result["processes"]["rows"]
    paths = [row_name(rule, path) for rule in OPTIMIZERS for path in ("process group", "DDP", "FSDP2")]
    assert set(paths) <= set(rows)
    assert [goal["what"] for goal in result["goals"]] == [f"2 processes: {name} / default" for name in paths]


def test_jax_and_the_first_step_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    result = run(tmp_path / "jax.json", "--sections", "jax", "first_step")
    assert {"make_update(adamw)", "make_update(optax.adamw)"} <= set(result["jax"]["6 leaves"])
    assert result["first_step"]["default, cold"]["graphs"] == 0


def test_a_row_is_what_is_left_over_its_bare_ones_for_a_tensor_and_pass() -> None:
    def start(workload: Workload) -> Any:
        raise AssertionError

    rows = [Row("bare", start), Row("base", start, ("bare",)), Row("other", start, ("bare",), passes=2, base="base")]
    walls = {"bare": 1.0, "base": 3.0, "other": 7.0}
    taken = {name: Taken(Seconds(8.0, 9.0), [Seconds(wall, 9.0)] * 3) for name, wall in walls.items()}
    found = figures(rows, taken, tensors=10)
    assert found["base"] == {"first_ms": 8e3, "step_ms": 3e3, "over_ms": 2e3, "passes": 1, "per_tensor_us": 2e5}
    assert found["other"]["per_tensor_us"] == 3e5
    assert found["other"]["ratio_to_base"] == 1.5


def test_every_row_that_is_referred_to_exists() -> None:
    for workload in WORKLOADS.values():
        rows = [*host.rows_of(workload, compiled=True)]
        names = [row.name for row in rows]
        assert len(names) == len(set(names))
        assert {needed for row in rows for needed in row.less} <= set(names)
        assert {row.base for row in rows} - {None} <= set(names)
        referred = {name for row, over, _ in host.GOALS[workload.name] for name in (row, over)}
        assert {name for name in referred if not name.startswith("optimi")} <= set(names)


def test_calls_are_counted_the_same_every_time() -> None:
    once = count_calls(StableAdamW, workload=TINY)
    assert once == count_calls(StableAdamW, workload=TINY)
    assert once.per_gradient >= 1  # the hook itself
    assert calls_per_gradient(AdamW, workload=TINY, max_norm=1.0) > 1


def test_a_goal_knows_whether_it_is_met() -> None:
    assert [Goal("it", 1.5, measured).met for measured in (1.5, 1.6, None)] == [True, False, None]
