"""The reverse walk obeys the specification as every other backend does."""

import pytest

pytest.importorskip("jax")

from penstock.parity.backends import choose
from penstock.parity.cases import select
from penstock.parity.rules import FAMILY


def kinds(quick: bool) -> set[tuple[str, str, str]]:
    """What a run takes in which nobody named the walk."""
    (walk,) = (backend for backend in choose(None, quick=quick)[0] if backend.name == "walk")
    cases = [case for case in select(None, quick=quick) if walk.refuses(case) is None]
    return {(case.problem.rule.name, case.problem.dtype, case.storage.compensation) for case in cases}


def test_a_quick_run_takes_stable_adamw_in_its_defaults_and_an_l2_term() -> None:
    pairs = {("float64", "none"), ("float32", "none"), ("bfloat16", "split")}
    assert kinds(quick=True) == {("adam", "float32", "none")} | {("stable_adamw", *pair) for pair in pairs}


def test_a_run_takes_every_rule_and_dtype_and_stable_adamw_with_every_compensation() -> None:
    everything = {(case.problem.rule.name, case.problem.dtype, case.storage.compensation) for case in select(None)}
    defaults = {("float64", "none"), ("float32", "none"), ("bfloat16", "split"), ("float16", "kahan")}
    of_others = {("float32", "none")}
    taken = {kind for kind in everything if kind[1:] in (defaults if kind[0] in FAMILY else of_others)}
    assert kinds(quick=False) == taken | {kind for kind in everything if kind[0] == "stable_adamw"}


@pytest.mark.parametrize("quick", [False, True])
def test_a_run_that_names_it_leaves_nothing_out(quick: bool) -> None:
    (backend,) = choose(["walk"], quick=quick)[0]
    assert all(backend.refuses(case) is None for case in select(None))


def test_a_run_that_does_not_name_it_leaves_storages_to_jax() -> None:
    (usual,) = (backend for backend in choose(None)[0] if backend.name == "walk")
    run_here = [case for case in select(None) if usual.refuses(case) is None]
    assert {case.storage.state_dtype for case in run_here} == {None}
    kinds = {(case.problem.dtype, case.storage.compensation) for case in run_here if case.problem.setting.name == "B"}
    assert kinds == {(case.problem.dtype, case.storage.compensation) for case in select("B/*")}
    left_out = {case.problem.setting.name for case in select(None)} - {case.problem.setting.name for case in run_here}
    assert left_out == {"A", "groups", "schedule"}  # B has A's tensor, and one setting has groups and a schedule
