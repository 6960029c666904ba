"""The section "marker": every way of release on the torch backends. Faults that it catches are in `faults`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.parity.faults.injection import tampered

from penstock.parity.backends.specification import NumpyBackend
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.events.section import DTYPES
from penstock.parity.markers import STEPS, USES, WAYS, MarkerCase, Markers, run_case
from penstock.parity.rules import FAMILY


@pytest.mark.parametrize("way", WAYS)
def test_every_norm_is_told_and_every_use_that_changes_something_is_refused(way: str) -> None:
    pytest.importorskip("torch")
    for rule in FAMILY.values():
        for dtype in DTYPES:
            found = run_case(TorchBackend("eager"), MarkerCase(way, rule, dtype))
            assert [row for row in found if not isinstance(row, Row) or not row.within] == []
            assert len(found) == 5 * STEPS


def test_a_quick_run_has_every_way_and_dtype() -> None:
    cases = Markers().cases(quick=True)
    assert [case.way for case in cases] == list(WAYS)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert {case.rule.name for case in cases} == set(FAMILY)


def test_a_use_that_is_not_refused_is_named() -> None:
    pytest.importorskip("torch")
    backend: Any = TorchBackend("eager")
    correct = backend.start_markers
    passes = tampered(refuses=lambda run, correct, use: False if use is USES["times a half"][0] else correct(use))
    backend.start_markers = lambda case: passes(correct, case)
    found = run_case(backend, MarkerCase("release", FAMILY["adamw"], "float32"))
    wrong = [row for row in found if isinstance(row, Row) and not row.within]
    assert [(row.quantity, row.data, row.units) for row in wrong] == STEPS * [("uses refused", {"wrong": ["times a half"]}, 1)]


def test_an_error_of_a_run_is_a_failed_row() -> None:
    backend = type("Mine", (NumpyBackend,), {"refuses_markers": lambda *_: None, "start_markers": lambda *_: None})()
    (row,) = run_case(backend, MarkerCase("release", FAMILY["adamw"], "float32"))
    assert isinstance(row, Row)
    assert not row.within
    assert (row.failure or "").startswith("step 1: AttributeError")


def test_a_backend_without_markers_is_refused() -> None:
    (refusal,) = run_case(NumpyBackend(), MarkerCase("release", FAMILY["adamw"], "float32"))
    assert isinstance(refusal, Refusal)
    assert "LeavesMarkers" in refusal.reason
