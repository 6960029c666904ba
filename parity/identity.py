"""The section "identity": laws that hold bit for bit.

    repeat            the same case twice
    release-is-step   gradient release against the plain optimizer's step() on the same gradients
    resume            saved in the middle, loaded into a run that was elsewhere, and gone on with, against one that went through
    skip              a step that is skipped because its gradient is not finite, against nothing
    frozen            parameters and compensation under a learning rate of zero, before and after a resume

All but the first are event sequences, and backends without those have the first alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..core.compensation import resolve
from ..core.rules import Rule
from .backends.calls import FAILURES, BrokenBackendError, checked, held_after, reason
from .backends.protocol import Backend, Held, converted
from .cases import Case, Problem, Storage
from .compare import Finding, Refusal, failed, identical
from .events import Backward, Event, EventCase, EventRun, EventSequence, LearningRate, Resumable, RunsEvents, Step
from .events.section import DTYPES
from .events.sequences import SEQUENCES
from .progress import Progress, each
from .rules import FAMILY, OTHERS, rules_and_dtypes
from .settings import named
from .updates import refusal

REPEATED = 5
"""Steps of the case that is repeated."""

_NAMED = {sequence.name: sequence for sequence in SEQUENCES}
_STEPS: tuple[Event, ...] = (Backward(), Step()) * 2


@runtime_checkable
class StepsPlainly(Protocol):
    """A backend that also runs without gradient release, for the law "release-is-step"."""

    def start_plain(self, case: EventCase) -> EventRun:
        """Start a run whose gradients are used by the optimizer's step()."""
        ...


class NotPromisedError(Exception):
    """A backend does not run a law; the text says why."""


Bits = Iterator[tuple[int, str, np.ndarray, np.ndarray]]
"""Numbers of steps, quantities, and two arrays that are promised to be equal."""


@dataclasses.dataclass(frozen=True)
class IdentityCase:
    """One law for one rule and dtype, with the default compensation."""

    law: str
    rule: Rule
    dtype: str

    @property
    def name(self) -> str:
        """identity/law/rule/dtype."""
        return f"identity/{self.law}/{self.rule.name}/{self.dtype}"

    def events(self, sequence: EventSequence) -> EventCase:
        """The case of a sequence for this rule and dtype."""
        return EventCase(sequence, self.rule, self.dtype)


class Identity:
    """The section "identity" of the suite."""

    name = "identity"
    title = "Promised to the bit: a repeat, release = step, a resumed run, a skipped step, a learning rate of zero"

    def cases(self, *, quick: bool) -> list[IdentityCase]:
        """Every law for every rule, for Adam and its relatives in every dtype.

        In a quick run for one dtype of each of these, that take turns, and for each other rule one law. None of those is one
        for which backends compile. Left out is "frozen" of a rule whose parameters go back by themselves (Ranger).
        """
        if not quick:
            cases = (IdentityCase(law, *pair) for law in LAWS for pair in rules_and_dtypes(DTYPES))
            return [case for case in cases if case.law != "frozen" or case.rule.after_step is None]
        found = []
        for turn, law in enumerate(LAWS):
            for number, rule in enumerate(FAMILY.values()):
                dtypes = [dtype for dtype in DTYPES if (rule.name, dtype) != _COMPILED_FOR]
                found.append(IdentityCase(law, rule, dtypes[(number + turn - 1) % len(dtypes)]))
            others = [rule for rule in OTHERS if law != "frozen" or rule.after_step is None]
            found += [IdentityCase(law, rule, "float32") for rule in others[turn :: len(LAWS)]]
        return found

    def run(
        self, backends: Sequence[Backend], cases: Sequence[IdentityCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        yield from each(cases, backends, progress, run_case)


def run_case(backend: Backend, case: IdentityCase) -> list[Finding]:
    """Check one law on one backend. An error becomes a broken row."""
    found: list[Finding] = []
    try:
        for steps, quantity, one, other in LAWS[case.law](backend, case):
            found.append(identical(case.name, backend.name, steps, quantity, one, other))
    except NotPromisedError as why:
        return [Refusal(case.name, backend.name, str(why))]
    except BrokenBackendError:
        raise
    except FAILURES as error:
        return [*found, failed(case.name, backend.name, 0, error, "bits")]
    return found


# -- the laws -----------------------------------------------------------------------------------------------------------


def _repeat(backend: Backend, case: IdentityCase) -> Bits:
    plain = Case(Problem(named("B"), case.rule, case.dtype), Storage(resolve("auto", case.dtype), None))
    why, events = refusal(backend, plain), case.events(_sequence("release", _STEPS))
    if events.not_compiled is not None and isinstance(backend, RunsEvents):
        why = why or reason(backend, "refuses_events", events)  # as it compiles, and this is not the case to do so for
    if why is not None:
        raise NotPromisedError(why)
    (one,), (other,) = (held_after(backend, plain, [REPEATED]) for _ in range(2))
    yield from _equal(REPEATED, one[1], other[1])


def _release_is_step(backend: Backend, case: IdentityCase) -> Bits:
    if not isinstance(backend, StepsPlainly):
        raise NotPromisedError("it has no gradient release beside a plain step (`parity.identity.StepsPlainly`)")
    for name in ("release", "unused", "tied", "hold", "overflow"):
        events = dataclasses.replace(_NAMED[name], compiled_for=_COMPILED_FOR)
        released = _start(backend, case.events(events))
        plain = backend.start_plain(case.events(events))
        _run((released, plain), events.events)
        for steps, quantity, *arrays in _equal(events.steps, _held(released, case), _held(plain, case)):
            yield steps, f"{quantity}, {name}", arrays[0], arrays[1]


def _resume(backend: Backend, case: IdentityCase) -> Bits:
    sequence = _sequence("release", _STEPS * 2)
    through, resumed = (_start(backend, case.events(sequence)) for _ in range(2))
    _run((through, resumed), _STEPS)
    resumed = _saved_and_loaded(resumed, _start(backend, case.events(sequence)))
    _run((through, resumed), _STEPS)
    yield from _equal(sequence.steps, _held(through, case), _held(resumed, case))


def _skip(backend: Backend, case: IdentityCase) -> Bits:
    """By the loss scale; where the backend has the choice, also by on_nonfinite."""
    refusals, overflow = [], Backward(nonfinite=("vector",))
    for sequence in (
        _sequence("overflow", (*_STEPS, overflow, Step()), loss_scale=_NAMED["overflow"].loss_scale),
        _sequence("nonfinite-hold", (*_STEPS, overflow, Step()), accumulation="hold", skips=True),
    ):
        try:
            run = _start(backend, case.events(sequence))
        except NotPromisedError as why:
            refusals.append(why)
            continue
        _run((run,), _STEPS)
        before, updates = _held(run, case), dict(run.updates())
        _run((run,), (overflow, Step()))
        for steps, quantity, *arrays in _equal(sequence.steps, _held(run, case), before):
            yield steps, f"{quantity}, {sequence.name}", arrays[0], arrays[1]
        counts = [np.asarray(list(each.values())) for each in (run.updates(), updates)]
        yield sequence.steps, f"number of updates, {sequence.name}", counts[0], counts[1]
    if len(refusals) == 2:
        raise refusals[0]


def _frozen(backend: Backend, case: IdentityCase) -> Bits:
    sequence = _sequence("frozen", (*_STEPS, LearningRate(0.0), *_STEPS * 2))
    run = _start(backend, case.events(sequence))
    _run((run,), _STEPS)
    before = _held(run, case)
    _run((run,), (LearningRate(0.0), *_STEPS))
    run = _saved_and_loaded(run, _start(backend, case.events(sequence)))
    _run((run,), _STEPS)
    after = _held(run, case)
    found = list(_equal(sequence.steps, after, before))
    frozen = [each for each in found if each[1] in ("parameter", "compensation")]
    if len(found) > len(frozen) and all(np.array_equal(one, other) for _, _, one, other in found):
        raise AssertionError("the fields did not move under a learning rate of zero, so that nothing was tried")
    yield from frozen


LAWS: Mapping[str, Callable[[Any, IdentityCase], Bits]] = {
    "repeat": _repeat,
    "release-is-step": _release_is_step,
    "resume": _resume,
    "skip": _skip,
    "frozen": _frozen,
}

_COMPILED_FOR = ("stable_adamw", "bfloat16")
"""The rule and dtype for which backends that compile run the laws: the one that keeps most."""


def _sequence(name: str, events: Iterable[Event], **more: Any) -> EventSequence:
    return EventSequence(name, tuple(events), compiled_for=_COMPILED_FOR, **more)


def _start(backend: Any, case: EventCase) -> EventRun:
    if not isinstance(backend, RunsEvents):
        raise NotPromisedError("it makes plain updates only (`parity.events.RunsEvents`)")
    why = reason(backend, "refuses_events", case)
    if why is not None:
        raise NotPromisedError(why)
    return backend.start_events(case)


def _run(runs: Iterable[EventRun], events: Iterable[Event]) -> None:
    events = list(events)
    for run in runs:
        for event in events:
            run.run(event)


def _held(run: EventRun, case: IdentityCase) -> Mapping[str, Held]:
    """Return copies of what a run holds, as a run may return its own arrays and change them later."""
    held = checked(case.events(_sequence("release", _STEPS)).problem(), run.held())
    return {name: converted(tensor.arrays(), np.array) for name, tensor in held.items()}


def _saved_and_loaded(run: EventRun, other: EventRun) -> EventRun:
    """The other one, after a step of its own: what it knew of its groups and its state must be gone."""
    if not isinstance(run, Resumable) or not isinstance(other, Resumable):
        raise NotPromisedError("its runs cannot be saved (`parity.events.Resumable`)")
    _run((other,), (Backward(factor=2.0), Step()))
    other.load(run.save())
    return other


def _equal(steps: int, one: Mapping[str, Held], other: Mapping[str, Held]) -> Bits:
    """Compare what two runs hold, array by array."""
    for quantity in {quantity: None for held in (*one.values(), *other.values()) for quantity in held.arrays()}:
        pairs = [(one[name].get(quantity), other[name].get(quantity)) for name in one]
        kept = [[array for array in arrays if array is not None] for arrays in zip(*pairs, strict=True)]
        if any(kept):
            flat = [np.concatenate([np.asarray(array).reshape(-1) for array in arrays]) for arrays in kept]
            yield steps, quantity, flat[0], flat[1]
