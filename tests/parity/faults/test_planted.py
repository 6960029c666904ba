"""Faults, one at a time in a backend that is otherwise correct: the suite catches each, and its report names the case."""

from __future__ import annotations

import dataclasses
import functools

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from tests.parity.faults import coding_faults, event_faults, rule_faults, update_faults
from tests.parity.faults.injection import Fault, caught, right, run

FAULTS = [*update_faults.FAULTS, *rule_faults.FAULTS, *coding_faults.FAULTS, *event_faults.FAULTS]


@functools.cache
def broken_without_a_fault(fault: Fault) -> bool:
    return bool(run(fault).broken)


def test_faults_have_names_of_their_own_and_are_in_every_backend() -> None:
    assert len({(fault.name, fault.backend, fault.case) for fault in FAULTS}) == len(FAULTS)
    assert {fault.backend for fault in FAULTS} == {"numpy", "eager", "jax", "walk"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.backend}: {fault.name}")
def test_a_planted_fault_is_caught_and_the_report_names_the_case(fault: Fault) -> None:
    assert not broken_without_a_fault(dataclasses.replace(fault, name="none", wrong=right, method=None))
    result = run(fault)
    assert result.broken
    assert caught(fault, result)
