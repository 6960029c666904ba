"""Event sequences, named and drawn at random, are obeyed by every backend. Faults that they catch are in `faults`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.parity.backends.jax_transforms import JaxBackend
from penstock.parity.backends.jax_walk import WalkBackend
from penstock.parity.backends.specification import NumpyBackend
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.events import Backward, Discard, EventCase, Events, EventSequence, LearningRate, Step
from penstock.parity.events.recorded import ALL
from penstock.parity.events.section import refusal, run_case
from penstock.parity.events.sequences import SEQUENCES
from penstock.parity.events.specification import NumpyEvents
from penstock.parity.events.truth import truth
from penstock.parity.progress import silent
from penstock.parity.rules import FAMILY


def rows_of(backend: Any, case: EventCase) -> list[Row]:
    return run_case(backend.name, backend, case, truth(case, backend.norm_eps))


def broken(backend: Any, case: EventCase) -> list[Row]:
    return [row for row in rows_of(backend, case) if not row.within]


def named(name: str, rule: str = "stable_adamw", dtype: str = "float32") -> EventCase:
    return EventCase(next(sequence for sequence in SEQUENCES if sequence.name == name), FAMILY[rule], dtype)


# -- the named sequences ------------------------------------------------------------------------------------------------


def test_pytorch_obeys_every_sequence() -> None:
    pytest.importorskip("torch")
    cases = Events().cases(quick=True)
    assert {case.sequence.name for case in cases} == {sequence.name for sequence in SEQUENCES}
    assert {(case.rule.name, case.dtype) for case in cases} >= {(rule, "float32") for rule in FAMILY}
    backend = TorchBackend("eager")
    rows = [row for case in cases for row in rows_of(backend, case)]
    assert [row for row in rows if not row.within] == []
    assert {row.quantity for row in rows} >= {"parameter", "live gradient bytes", "number of updates"}


def test_each_sequence_makes_its_updates_and_keeps_its_bytes() -> None:
    """Numbers of updates, by tensor; and bytes that wait, after each event."""
    assert truth(named("overflow")).updates == dict.fromkeys(ALL, 3)
    assert truth(named("nonfinite")).updates == {"matrix": 5, "vector": 5, "scalar": 4}
    assert truth(named("nonfinite-hold")).updates == dict.fromkeys(ALL, 2)
    assert truth(named("nonfinite-state")).updates == {"matrix": 4, "vector": 4, "scalar": 4}
    assert truth(named("unused")).updates == {"matrix": 4, "vector": 4, "scalar": 4}
    assert truth(named("discard")).updates == dict.fromkeys(ALL, 2)
    assert max(truth(named("release")).live_bytes) == 0
    assert truth(named("hold")).live_bytes[:5] == (92, 92, 92, 92, 0)  # 23 elements of 4 bytes
    assert truth(named("hold-last-known")).live_bytes[:5] == (92, 92, 92, 0, 0)
    assert truth(named("pause")).live_bytes[:3] == (92, 0, 0)


def test_sequences_that_a_backend_does_not_run_are_refused_with_the_reason() -> None:
    case = named("unused")
    found = list(Events().run([NumpyBackend(), WalkBackend(), PlainOnly()], [case], [1], silent))
    reasons = {finding.backend: finding.reason for finding in found if isinstance(finding, Refusal)}
    assert "gradient of zero" in reasons["walk"]
    assert "plain updates only" in reasons["plain"]
    assert {finding.backend for finding in found if isinstance(finding, Row)} == {"numpy"}
    for backend in (JaxBackend(), WalkBackend()):
        assert all(refusal(backend, case) for case in Events().cases(quick=False) if case.not_compiled)


class PlainOnly:
    """An optimizer of somebody else: it has no event sequences."""

    name = "plain"

    def unavailable(self) -> None:
        return None

    def refuses(self, case: Any) -> None:
        return None

    def start(self, case: Any) -> Any:
        raise NotImplementedError


def test_an_error_of_a_backend_is_a_broken_row() -> None:
    class Raises(NumpyBackend):
        def start_events(self, case: EventCase) -> NumpyEvents:
            run = NumpyEvents(case)
            run.parameters.clear()
            return run

    (row,) = rows_of(Raises(), named("release"))
    assert (row.failure or "").startswith("event 1: KeyError")
    assert not row.within


# -- any sequence -------------------------------------------------------------------------------------------------------


def some_of(tensors: tuple[str, ...] = ALL, least: int = 1) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(tensors), unique=True, min_size=least).map(tuple)


@st.composite
def sequences(draw: st.DrawFn) -> EventSequence:
    """Loops that the release machine accepts: any policy, micro-batches, missing and non-finite gradients, and the rest."""
    accumulation = draw(st.sampled_from([None, "hold", "state"]))
    kinds = ["plain", "plain", "skip", "each", "clip", "scale"] if accumulation is None else ["plain", "skip", "each"]
    kind = draw(st.sampled_from(kinds))
    if accumulation == "hold":
        kind = draw(st.sampled_from([kind, "clip"]))
    last_known = accumulation is not None and kind != "clip" and draw(st.booleans())
    events: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 3)) == 0:
            events.append(LearningRate(draw(st.sampled_from([0.0, 1e-3, 3e-2]))))
        count = draw(st.integers(1, 3)) if accumulation is not None or kind in ("plain", "skip", "each") else 1
        group = []
        for number in range(count):
            final = number == count - 1
            tensors = draw(some_of())
            bad = draw(some_of(tensors, least=0)) if kind in ("skip", "scale") and draw(st.booleans()) else ()
            # A pass that is not the last of its step, where nothing accumulates, has to be paused.
            may_pause = kind in ("plain", "skip", "each")
            paused = not final and (accumulation is None or (may_pause and draw(st.integers(0, 2)) == 0))
            factor = draw(st.sampled_from([0.01, 1.0, 30.0]))
            group.append(Backward(tensors, factor, bad, paused, last=final and draw(st.booleans())))
        events += group
        discards = accumulation != "state" and draw(st.integers(0, 4)) == 0
        events.append(Discard() if discards else Step())
    return EventSequence(
        "any",
        tuple(events),
        accumulation,
        last_known,
        max_norm=1.0 if kind in ("clip", "each") else None,
        clips_each=kind == "each",
        loss_scale=2.0**10 if kind == "scale" else None,
        skips=kind == "skip",
        tied=draw(st.booleans()),
    )


ANY_CASE = st.builds(EventCase, sequences(), st.sampled_from(list(FAMILY.values())), st.just("float64"))


@given(case=ANY_CASE)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_specification_follows_the_reference_through_any_sequence(case: EventCase) -> None:
    assert broken(NumpyBackend(), case) == []


@given(case=ANY_CASE)
@settings(max_examples=75, deadline=None, derandomize=True)
def test_pytorch_follows_the_reference_through_any_sequence(case: EventCase) -> None:
    pytest.importorskip("torch")
    assert broken(TorchBackend("eager"), case) == []


@st.composite
def jax_sequences(draw: st.DrawFn) -> EventSequence:
    """Steps of 1, 2 or 4 micro-batches."""
    events: list[Any] = []
    for _ in range(draw(st.integers(1, 2))):
        factor = draw(st.sampled_from([0.01, 30.0]))
        events += [*(Backward(factor=factor) for _ in range(draw(st.sampled_from([1, 2, 4])))), Step()]
    max_norm = draw(st.sampled_from([None, 1.0]))
    return EventSequence("any", tuple(events), "hold", max_norm=max_norm, compiled_for=("stable_adamw", "float64"))


@given(sequence=jax_sequences())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_jax_follows_the_reference_through_any_sequence(sequence: EventSequence) -> None:
    pytest.importorskip("jax")
    case = EventCase(sequence, FAMILY["stable_adamw"], "float64")
    assert JaxBackend().refuses_events(case) is None
    assert broken(JaxBackend(), case) == []
