"""Backends of users that raise or return what they must not: a sentence that names the method, and never a success."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from penstock.__main__ import main
from penstock.core.errors import InvalidArgumentError
from penstock.parity import Held, register, run, unregister
from penstock.parity.backends.calls import BrokenBackendError, held_after
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.cases import select
from penstock.parity.codings.numpy_runs import NumpyCodings
from penstock.parity.compare import Row
from penstock.parity.events.specification import NumpyEvents
from penstock.parity.memory import CASES, run_case
from penstock.parity.sections import SECTIONS

CASES_OF = {
    "updates": "B/adamw/float32/none/state-default",
    "differences": "differences/adamw/float32",
    "identity": "identity/repeat/adamw/float32",
    "events": "events/release/adamw/float32",
    "codings": "codings/adamw/bfloat16/split8/state-8bit",
}
"""A case of every section that runs backends of users."""

REFUSES = {"events": "refuses_events", "codings": "refuses_codings"}
"""What says that it does not run a case of a section, where it is not `refuses`."""


def explode(*_: Any) -> Any:
    raise ZeroDivisionError("too\nmuch")


def leave(*_: Any) -> Any:
    raise SystemExit(0)


@pytest.fixture
def mine() -> Iterator[Callable[..., None]]:
    def made(**methods: Any) -> None:
        register(type("Mine", (NumpyBackend,), {"name": "mine", **methods})())

    yield made
    unregister("mine")


def with_run(**methods: Any) -> dict[str, Any]:
    """A backend whose runs have these methods."""
    return {"start": lambda backend, case: type("MyRun", (NumpyRun,), methods)(case)}


ANSWERS = {
    "raises": (explode, "raised ZeroDivisionError: too much; it must return a sentence, or None."),
    "exits": (leave, "raised SystemExit: 0; it must return a sentence, or None."),
    "a truth": (lambda *_: True, "returned True; it must return a sentence, or None."),
    "no sentence": (lambda *_: " ", "returned ' '; it must return a sentence, or None."),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    ("section", "method"),
    [
        ("updates", "unavailable"),
        *((section, REFUSES.get(section, "refuses")) for section in CASES_OF),
    ],
)
def test_a_backend_that_cannot_say_what_it_runs_is_bad_usage(
    section: str, method: str, answer: str, mine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, sentence = ANSWERS[answer]
    mine(**{method: wrong})
    assert main(("parity", "--backend", "numpy", "--backend", "mine", "--cases", CASES_OF[section])) == 2
    out, err = capsys.readouterr()
    assert err == f"penstock parity: backend='mine': {method}() {sentence}\n"
    assert out == ""


def test_a_backend_that_cannot_say_whether_it_is_there_is_not_left_out_in_silence(mine: Callable[..., None]) -> None:
    mine(unavailable=explode)
    with pytest.raises(BrokenBackendError, match="backend='mine': unavailable"):
        run(None, CASES_OF["updates"], [1])


class NotHeld:
    """What `held` might return instead."""

    parameter = np.zeros((17, 43), np.float32)


def held_with(**fields: Any) -> Callable[[NumpyRun], Mapping[str, Held]]:
    return lambda running: {name: Held(**{**vars(held), **fields}) for name, held in NumpyRun.held(running).items()}


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "constructor": ({"start": explode}, "start(): ZeroDivisionError: too much"),
    "no run": ({"start": lambda *_: None}, "step() number 1: AttributeError: 'NoneType' object has no attribute 'step'"),
    "step": (with_run(step=explode), "step() number 1: ZeroDivisionError: too much"),
    "exit": (with_run(step=leave), "step() number 1: SystemExit: 0"),
    "held": (with_run(held=explode), "held() after step"),
    "None": (with_run(held=lambda _: None), "held() returned NoneType; it must return a mapping"),
    "no tensors": (with_run(held=lambda _: {}), "held() has the tensors []; it must have ['matrix']"),
    "not Held": (with_run(held=lambda _: {"matrix": NotHeld()}), "held() has NotHeld for 'matrix'; it must have a `Held`"),
    "list": (with_run(held=held_with(parameter=[1.0])), "parameter of 'matrix' is list; it must be a numpy array"),
    "no parameter": (with_run(held=held_with(parameter=None)), "parameter of 'matrix' is NoneType; it must be a numpy array"),
    "shape": (with_run(held=held_with(exp_avg=np.zeros(3))), "exp_avg of 'matrix' has the shape [3]; it must have [17, 43]"),
    "dtype": (
        with_run(held=held_with(exp_avg_sq=np.zeros((17, 43), int))),
        "exp_avg_sq of 'matrix' is int64; it must be one of",
    ),
    "compensation": (
        with_run(held=held_with(compensation=np.zeros((17, 43), np.int16))),
        "compensation of 'matrix' is int16; it must be one of float32",
    ),
}


@pytest.mark.parametrize("fault", RUNS)
def test_a_run_that_fails_is_a_failed_row_that_names_the_method(fault: str, mine: Callable[..., None]) -> None:
    methods, sentence = RUNS[fault]
    mine(**methods)
    for section in ("updates", "differences", "identity"):
        rows = [row for row in run(["numpy", "mine"], CASES_OF[section], [2]) if row.backend == "mine"]
        assert len(rows) == 1
        assert not rows[0].within
        assert sentence in rows[0].failure


@pytest.mark.parametrize(
    ("methods", "place"),
    [
        ({"__init__": explode}, "start_events(): ZeroDivisionError: too much"),
        ({"run": explode}, "event 1: ZeroDivisionError: too much"),
        ({"held": lambda _: {}}, "held(): InvalidArgumentError: held() has the tensors []"),
        ({"updates": lambda _: None}, "updates(): TypeError"),
        ({"updates": lambda _: {"matrix": 6}}, "updates(): KeyError: 'vector'"),
        ({"live_bytes": lambda run: [0] * (1 + run.passes % 2)}, "live_bytes(): ValueError"),
    ],
)
def test_an_event_run_that_fails_is_a_failed_row(methods: dict[str, Any], place: str, mine: Callable[..., None]) -> None:
    mine(start_events=lambda backend, case: type("MyEvents", (NumpyEvents,), methods)(case))
    (row,) = run(["mine"], CASES_OF["events"])
    assert not row.within
    assert row.failure.startswith(place)


@pytest.mark.parametrize(
    ("methods", "place"),
    [
        ({"__init__": explode}, "start_codings(): ZeroDivisionError: too much"),
        ({"update": explode}, "update() number 1: ZeroDivisionError: too much"),
        ({"held": lambda _: {}}, "held() after update 1: KeyError: 'matrix'"),
    ],
)
def test_a_run_of_a_coding_that_fails_is_a_failed_row(methods: dict[str, Any], place: str, mine: Callable[..., None]) -> None:
    mine(start_codings=lambda backend, case: type("MyCodings", (NumpyCodings,), methods)(case))
    (row,) = run(["mine"], CASES_OF["codings"])
    assert not row.within
    assert row.failure.startswith(place)


@pytest.mark.parametrize("measured", [explode, lambda *_: None, lambda *_: [("peak", 1)]])
def test_memory_that_is_measured_wrongly_is_a_failed_row(measured: Callable[..., Any]) -> None:
    backend = type("Mine", (NumpyBackend,), {"refuses_memory": lambda *_: None, "measure_memory": measured})()
    (row,) = run_case(backend, CASES[0])
    assert isinstance(row, Row)
    assert not row.within
    assert row.failure.startswith("measure_memory(): ")


def test_arrays_that_a_run_changes_later_are_compared_as_they_were(mine: Callable[..., None]) -> None:
    """A run that hands out its own arrays and changes them in a skipped step is seen."""

    class InPlace(NumpyEvents):
        def _step(self) -> None:
            before = dict(self.counts)
            super()._step()
            for name in [name for name, count in self.counts.items() if count == before[name]]:
                self.states[name].fields[0][...] = 0

    mine(start_events=lambda backend, case: InPlace(case))
    rows = run(["mine"], "identity/skip/adamw/float32")
    assert any(not row.within for row in rows if row.quantity.startswith("exp_avg,"))


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (NumpyBackend, "backend=NumpyBackend is a class; register an instance of it."),
        (type("Mine", (NumpyBackend,), {"name": ""})(), "name='' of a backend must be what --backend takes"),
        (type("Mine", (NumpyBackend,), {"name": 3})(), "name=3 of a backend must be what --backend takes"),
        (
            type("Mine", (NumpyBackend,), {"name": "x", "abilities": ["magic"]})(),
            r"abilities=\['magic'\] of backend 'x' must be",
        ),
        (type("Mine", (NumpyBackend,), {"name": "x", "norm_eps": None})(), "norm_eps=None of backend 'x' must be a number"),
    ],
)
def test_a_description_that_cannot_be_is_refused_at_once(backend: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        register(backend)


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"backends='numpy' must be a list of names, such as \['numpy'\]"):
        run("numpy")
    with pytest.raises(InvalidArgumentError, match="name='nobody' is not known"):
        unregister("nobody")


def test_every_section_that_runs_backends_of_users_is_looked_at() -> None:
    """The others need what only penstock's own have, or are looked at above."""
    others = {"memory", "marker", "trajectories", "frameworks", "conversion"}
    assert {section.name for section in SECTIONS} == {*CASES_OF, *others}


def test_held_after_yields_at_the_steps_asked_for() -> None:
    (case,) = select(CASES_OF["updates"])
    found = dict(held_after(NumpyBackend(), case, [1, 3]))
    assert list(found) == [1, 3]
    assert not np.array_equal(found[1]["matrix"].parameter, found[3]["matrix"].parameter)
