"""The section "events": sequences of the release machine on every backend that can run them, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...core.rules import Rule
from ..backends.calls import FAILURES, reason
from ..backends.protocol import Backend
from ..cases import Case
from ..compare import Finding, Refusal, Row, failed, identical, rows
from ..progress import Progress
from ..rules import FAMILY, OTHERS, rules_and_dtypes
from ..truth import Truth
from .protocol import RunsEvents
from .recorded import SHAPES, EventCase
from .sequences import SEQUENCES
from .truth import EventTruth, truth

DTYPES = ("float64", "float32", "bfloat16")

QUICKLY_COMPILED = ("hold", "state")
"""Sequences for which a quick run compiles programs."""


class Events:
    """The section "events" of the suite."""

    name = "events"
    title = "Event sequences of the release machine against the float64 reference, live gradient bytes among them"

    def cases(self, *, quick: bool) -> list[EventCase]:
        """Every sequence for every rule, for Adam and its relatives in every dtype.

        In a quick run for one of these and one dtype each, that take turns; each other rule has one sequence. What a rule
        refuses, micro-batches in a state that its step cannot be taken from, is left out.
        """
        cases = [EventCase(sequence, *pair) for sequence in SEQUENCES for pair in rules_and_dtypes(DTYPES)]
        possible = [case for case in cases if not (case.sequence.accumulation == "state" and case.rule.needs_gradient)]
        if not quick:
            return possible
        pairs = [(rule, dtype) for dtype in DTYPES for rule in FAMILY.values()]
        found = [EventCase(sequence, *pair) for sequence, pair in zip(SEQUENCES, _turns(pairs), strict=True)]
        for number, rule in enumerate(OTHERS):
            of_rule = [case for case in possible if case.rule is rule]
            found.append(of_rule[number * len(of_rule) // len(OTHERS)])
        return found

    def run(
        self, backends: Sequence[Backend], cases: Sequence[EventCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        for case in cases:
            progress(case.name, "reference")
            clips = case.sequence.max_norm is not None
            norms = {backend.norm_eps if clips else 0.0 for backend in backends if isinstance(backend, RunsEvents)}
            true = {norm_eps: truth(case, norm_eps) for norm_eps in norms}
            for backend in backends:
                progress(case.name, backend.name)
                why = refusal(backend, case)
                if why is not None:
                    yield Refusal(case.name, backend.name, why)
                elif isinstance(backend, RunsEvents):
                    yield from run_case(backend.name, backend, case, true[backend.norm_eps if clips else 0.0])


def _turns(pairs: Sequence[tuple[Rule, str]]) -> Iterator[tuple[Rule, str]]:
    """A rule and a dtype for each sequence; those of `QUICKLY_COMPILED`, and of no other, are run by backends that compile."""
    for number, sequence in enumerate(SEQUENCES):
        usual = [pair for pair in pairs if (pair[0].name, pair[1]) != sequence.compiled_for]
        compiled = [pair for pair in pairs if pair not in usual]
        yield compiled[0] if sequence.name in QUICKLY_COMPILED else usual[number % len(usual)]


def refusal(backend: Backend, case: EventCase) -> str | None:
    """Return why a backend does not run a case, or None if it does."""
    if not isinstance(backend, RunsEvents):
        return "it makes plain updates only (`parity.events.protocol.RunsEvents`)"
    return reason(backend, "refuses_events", case)


def run_case(name: str, backend: RunsEvents, case: EventCase, true: EventTruth) -> list[Row]:
    """Run one case on one backend. An error becomes a broken row."""
    steps, at = case.sequence.steps, "start_events()"
    live: list[list[int]] = []
    try:
        running = backend.start_events(case)
        for number, event in enumerate(case.sequence.events, 1):
            at = f"event {number}"
            running.run(event)
            live.append(list(running.live_bytes() or ()))
        at = "held()"
        stored = Case(case.problem(), case.storage)
        bounds = {case.storage: true.bounds}
        found = rows(stored, name, running.held(), Truth(steps, true.values, bounds, bounds), name=case.name)
        at = "updates()"
        updates = running.updates()
        counts = [np.asarray([of[tensor] for tensor in SHAPES], np.int64) for of in (updates, true.updates)]
        found.append(identical(case.name, name, steps, "number of updates", *counts))
        at = "live_bytes()"
        if live[0]:
            accounts = np.asarray(live, np.int64)
            expected = np.repeat(np.asarray(true.live_bytes)[:, None], accounts.shape[1], axis=1)
            found.append(identical(case.name, name, steps, "live gradient bytes", accounts, expected))
    except FAILURES as error:
        return [failed(case.name, name, steps, error, at=at)]
    return found
