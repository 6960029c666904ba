"""Live gradient bytes as the suite tells them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.parity.backends.jax_walk import WalkBackend
from penstock.parity.backends.specification import NumpyBackend
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.memory import CASES, LAYERS, ONE, Memory, expected_peak, run_case


def case(policy: str) -> Any:
    return next(each for each in CASES if each.policy == policy)


def test_the_ledger_of_each_policy() -> None:
    assert [each.policy for each in Memory().cases(quick=True)] == ["release", "hold", "state", "clip", "scale", "pause"]
    for each in CASES:
        waits = each.policy in ("hold", "pause")
        assert expected_peak(each, arriving=False) == (LAYERS if waits else 1) * ONE
        assert expected_peak(each, arriving=True) == (LAYERS + 1 if waits else 1) * ONE


@pytest.mark.parametrize("policy", [each.policy for each in CASES])
def test_pytorch_holds_what_the_ledger_says(policy: str) -> None:
    pytest.importorskip("torch")
    found = run_case(TorchBackend("eager"), case(policy))
    assert len(found) == 3
    for row in found:
        assert isinstance(row, Row)
        assert row.within, row
        assert row.data is not None
        passes = 2 if policy in ("clip", "scale") else case(policy).micro_batches  # one to measure, one to update
        assert len(row.data["timeline"]) == LAYERS * passes


@pytest.mark.parametrize("policy", ["release", "clip"])
def test_the_walk_needs_a_few_layers(policy: str) -> None:
    pytest.importorskip("jax")
    found = run_case(WalkBackend(), case(policy))
    assert [row.quantity for row in found if isinstance(row, Row)] == ["temporary bytes, XLA", "donated bytes, XLA"]
    assert all(isinstance(row, Row) and row.within for row in found)


def test_a_policy_that_is_not_measured_is_refused_with_the_reason() -> None:
    (refusal,) = run_case(NumpyBackend(), case("release"))
    assert isinstance(refusal, Refusal)
    assert "ShowsMemory" in refusal.reason
    (refusal,) = run_case(WalkBackend(), case("pause"))
    assert isinstance(refusal, Refusal)
    assert "nothing can be paused" in refusal.reason
    (refusal,) = run_case(WalkBackend("quick"), case("hold"))
    assert isinstance(refusal, Refusal)
