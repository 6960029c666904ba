"""The reverse walk obeys the specification as every other backend does."""

import pytest

pytest.importorskip("jax")

from penstock.parity import run
from penstock.parity.backends import choose, jax_walk
from penstock.parity.cases import select

DEFAULTS = "B/stable_adamw/*/state-default"


@pytest.mark.parametrize(
    "pattern", [DEFAULTS, "decay/adamw/float32/*", "shapes/adam/float32/*", "B/adam/bfloat16/split/state-float32"]
)
def test_the_walk_is_within_every_bound(pattern: str) -> None:
    rows = run(["walk"], pattern, [1, 100])
    assert len(rows) == 2 * 3 * len(select(pattern))
    assert [row for row in rows if not row.within] == []


@pytest.mark.parametrize("neighbour", [0, 2])
def test_the_gradient_of_another_layer_breaks_a_bound(neighbour: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_walk, "MIDDLE", neighbour)
    assert not any(row.within for row in run(["walk"], "B/stable_adamw/float32/*", [1, 100]))


def test_a_quick_run_takes_every_rule_and_every_dtype_with_its_default_compensation() -> None:
    (quick,) = (backend for backend in choose(None, quick=True)[0] if backend.name == "walk")
    cases = [case for case in select(None, quick=True) if quick.refuses(case) is None]
    kinds = {(case.problem.rule.name, case.problem.dtype, case.storage.compensation) for case in cases}
    pairs = {("float64", "none"), ("float32", "none"), ("bfloat16", "split"), ("float16", "kahan")}
    rules = {(rule, "float32", "none") for rule in ("stable_adamw", "adamw", "adam")}
    assert kinds == rules | {("stable_adamw", *pair) for pair in pairs}


def test_a_quick_run_that_names_it_leaves_nothing_out() -> None:
    (backend,) = choose(["walk"], quick=True)[0]
    assert all(backend.refuses(case) is None for case in select(None))


def test_a_run_that_does_not_name_it_leaves_storages_to_jax() -> None:
    (usual,) = (backend for backend in choose(None)[0] if backend.name == "walk")
    run_here = [case for case in select(None) if usual.refuses(case) is None]
    assert {case.storage.state_dtype for case in run_here} == {None}
    kinds = {(case.problem.dtype, case.storage.compensation) for case in run_here if case.problem.setting.name == "B"}
    assert kinds == {(case.problem.dtype, case.storage.compensation) for case in select("B/*")}
    assert {case.problem.setting.name for case in run_here} == {case.problem.setting.name for case in select(None)}
