"""Faults, planted one at a time into the real code: the suite catches each, and its report names the case."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from tests.parity.faults import core_faults, jax_faults, release_faults, torch_faults
from tests.parity.faults.planting import Fault, caught, planted, run

FAULTS = [*core_faults.FAULTS, *torch_faults.FAULTS, *release_faults.FAULTS, *jax_faults.FAULTS]


@functools.cache
def broken_without_a_fault(case: str, backend: str, steps: int) -> bool:
    return bool(run(Fault("none", lambda patch: None, case, backend, steps)).broken)


def test_the_list_is_long_and_has_every_section_that_judges_updates() -> None:
    assert len({(fault.name, fault.backend) for fault in FAULTS}) == len(FAULTS) >= 25
    assert {fault.backend for fault in FAULTS} == {"numpy", "eager", "jax", "walk"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.backend}: {fault.name}")
def test_a_planted_fault_is_caught_and_the_report_names_the_case(fault: Fault) -> None:
    assert not broken_without_a_fault(fault.case, fault.backend, fault.steps)
    with planted(fault):
        result = run(fault)
    assert result.broken
    assert caught(fault, result)
