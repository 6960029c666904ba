"""Promises to the bit: kept, and seen where they are broken."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.rules import RULES
from penstock.parity.backends.jax_transforms import JaxBackend
from penstock.parity.backends.jax_walk import WalkBackend
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.cases import Case
from penstock.parity.compare import Refusal, Row
from penstock.parity.events import EventCase, LearningRate
from penstock.parity.events.specification import NumpyEvents
from penstock.parity.identity import LAWS, Identity, IdentityCase, run_case


def rows(backend: Any, case: IdentityCase) -> list[Row]:
    found = run_case(backend, case)
    assert all(isinstance(finding, Row) for finding in found), found
    return [finding for finding in found if isinstance(finding, Row)]


def case(law: str, rule: str = "stable_adamw", dtype: str = "bfloat16") -> IdentityCase:
    return IdentityCase(law, RULES[rule], dtype)


def test_the_specification_keeps_every_promise() -> None:
    cases = [each for each in Identity().cases(quick=False) if each.law != "release-is-step"]
    assert [row for each in cases for row in rows(NumpyBackend(), each) if not row.within] == []
    assert {each.law for each in Identity().cases(quick=True)} == set(LAWS)


def test_pytorch_keeps_every_promise() -> None:
    pytest.importorskip("torch")
    for each in Identity().cases(quick=False):
        found = rows(TorchBackend("eager"), each)
        assert found
        assert [row for row in found if not row.within] == []


@pytest.mark.parametrize("law", ["repeat", "resume", "frozen"])
def test_jax_keeps_promises(law: str) -> None:
    pytest.importorskip("jax")
    found = rows(JaxBackend(), case(law))
    assert {row.quantity for row in found} >= {"parameter", "compensation"}
    assert [row for row in found if not row.within] == []


def test_the_walk_skips_a_step_without_a_trace() -> None:
    pytest.importorskip("jax")
    found = rows(WalkBackend(), case("skip"))
    assert len(found) == 5
    assert [row for row in found if not row.within] == []


def test_what_is_not_promised_is_said() -> None:
    (refusal,) = run_case(NumpyBackend(), case("release-is-step"))
    assert isinstance(refusal, Refusal)
    assert "no gradient release" in refusal.reason
    (refusal,) = run_case(JaxBackend(), case("skip"))
    assert isinstance(refusal, Refusal)
    assert "scale the loss" in refusal.reason


# -- broken promises ----------------------------------------------------------------------------------------------------


class Broken(NumpyBackend):
    """The specification with a run of its own, plain and for events."""

    def __init__(self, events: type[NumpyEvents] = NumpyEvents, plain: type[NumpyRun] = NumpyRun) -> None:
        self.events, self.plain = events, plain

    def start(self, case: Case) -> NumpyRun:
        return self.plain(case)

    def start_events(self, case: EventCase) -> NumpyEvents:
        return self.events(case)

    def start_plain(self, case: EventCase) -> NumpyEvents:
        """Below, release rounds other numbers than this."""
        return NumpyEvents(case)


class Noisy(NumpyRun):
    runs = 0

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        Noisy.runs += 1
        first = self.parameters["matrix"]
        first[0, 0] += Noisy.runs


class ForgetsTheCount(NumpyEvents):
    def load(self, saved: bytes) -> None:
        super().load(saved)
        self.counts = dict.fromkeys(self.counts, 0)


class DecaysOnASkippedStep(NumpyEvents):
    def _step(self) -> None:
        before = dict(self.counts)
        super()._step()
        for name in [name for name, count in self.counts.items() if count == before[name]]:
            self.states[name] = self.states[name]._replace(exp_avg=self.states[name].exp_avg * 0)


class MovesByItself(NumpyEvents):
    def run(self, event: Any) -> None:
        super().run(LearningRate(1e-2) if event == LearningRate(0.0) else event)


class ReleasesAnother(NumpyEvents):
    def _backward(self, event: Any, gradients: Any) -> None:
        super()._backward(event, {name: gradient * gradient.dtype.type(1.01) for name, gradient in gradients.items()})


@pytest.mark.parametrize(
    ("law", "backend", "quantity"),
    [
        ("repeat", Broken(plain=Noisy), "parameter"),
        ("resume", Broken(ForgetsTheCount), "exp_avg"),
        ("skip", Broken(DecaysOnASkippedStep), "exp_avg, nonfinite-hold"),
        ("frozen", Broken(MovesByItself), "parameter"),
        ("release-is-step", Broken(ReleasesAnother), "exp_avg, release"),
    ],
)
def test_a_broken_promise_is_seen(law: str, backend: Broken, quantity: str) -> None:
    broken = [row for row in rows(backend, case(law, dtype="float32")) if not row.within]
    assert quantity in {row.quantity for row in broken}
    assert all(row.units > 0 for row in broken)


def test_what_a_backend_raises_is_a_broken_row() -> None:
    class Raises(NumpyEvents):
        def save(self) -> bytes:
            raise OSError("no space left")

    (row,) = rows(Broken(Raises), case("resume"))
    assert row.failure == "OSError: no space left"
