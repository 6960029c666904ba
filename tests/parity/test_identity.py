"""Promises to the bit are kept by every backend. Faults that break them are in `faults`."""

from __future__ import annotations

from typing import Any

from penstock.parity.backends.jax_transforms import JaxBackend
from penstock.parity.backends.specification import NumpyBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.events import EventCase
from penstock.parity.events.specification import NumpyEvents
from penstock.parity.identity import LAWS, Identity, IdentityCase, run_case
from penstock.parity.rules import FAMILY


def rows(backend: Any, case: IdentityCase) -> list[Row]:
    found = run_case(backend, case)
    assert all(isinstance(finding, Row) for finding in found), found
    return [finding for finding in found if isinstance(finding, Row)]


def case(law: str, rule: str = "stable_adamw", dtype: str = "bfloat16") -> IdentityCase:
    return IdentityCase(law, FAMILY[rule], dtype)


def test_a_quick_run_has_every_law() -> None:
    assert {each.law for each in Identity().cases(quick=True)} == set(LAWS)


def test_a_law_that_a_backend_does_not_promise_is_refused() -> None:
    (refusal,) = run_case(NumpyBackend(), case("release-is-step"))
    assert isinstance(refusal, Refusal)
    assert "no gradient release" in refusal.reason
    (refusal,) = run_case(JaxBackend(), case("skip"))
    assert isinstance(refusal, Refusal)
    assert "scale the loss" in refusal.reason


def test_an_error_of_a_backend_is_a_broken_row() -> None:
    class Raises(NumpyEvents):
        def save(self) -> bytes:
            raise OSError("no space left")

    class Broken(NumpyBackend):
        def start_events(self, case: EventCase) -> NumpyEvents:
            return Raises(case)

    (row,) = rows(Broken(), case("resume"))
    assert row.failure == "OSError: no space left"
