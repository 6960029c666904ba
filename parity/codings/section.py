"""The section "codings": every update of every coding, from the numbers that a backend holds, against its definition."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..backends.calls import FAILURES, FailedRunError, described, reason
from ..backends.protocol import Backend
from ..bounds import Bound, spacing, stored_spacing
from ..compare import Finding, Refusal, Row, against, failed
from ..progress import Progress, each
from .cases import CASES, UPDATES, CodingCase
from .definitions import Ends, decoded, number
from .protocol import HeldTensor, RunsCodings
from .truth import after_update


class Codings:
    """The section "codings" of the suite."""

    name = "codings"
    title = (
        "Every coding, update by update from what a backend holds, against its definition in float64 with the same random bits"
    )

    def cases(self, *, quick: bool) -> list[CodingCase]:
        """All cases; in a quick run three that have every coding."""
        return [case for case in CASES if case.quick or not quick]

    def run(
        self, backends: Sequence[Backend], cases: Sequence[CodingCase], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        yield from each(cases, backends, progress, run_case)


def run_case(backend: Backend, case: CodingCase) -> list[Finding]:
    """Compare every update of a case. An error becomes a broken row."""
    if not isinstance(backend, RunsCodings):
        return [Refusal(case.name, backend.name, "it has no codings that the suite could read (`parity.codings.RunsCodings`)")]
    why = reason(backend, "refuses_codings", case)
    if why is not None:
        return [Refusal(case.name, backend.name, why)]
    try:
        return list(rows(case, backend.name, compared(backend, case)))
    except FailedRunError as error:
        return [failed(case.name, backend.name, UPDATES, error)]


def compared(backend: RunsCodings, case: CodingCase) -> dict[str, list[tuple[np.ndarray, Ends]]]:
    """Return what a backend stores and what it should store, by quantity: of each update and tensor, one after the other.

    Raises:
        FailedRunError: a method raised, or returned what it must not.
    """
    found: dict[str, list[tuple[np.ndarray, Ends]]] = {}
    before: Mapping[str, HeldTensor] = case.initial()
    may_flush, at = bool(getattr(backend, "flushes_subnormals", False)), "start_codings()"
    try:
        run = backend.start_codings(case)
        keys, from_stored = run.keys(), run.steps_from_stored()
        for step in range(1, UPDATES + 1):
            gradients, at = case.gradients(step), f"update() number {step}"
            run.update(gradients)
            at = f"held() after update {step}"
            after = run.held()
            for name, ends in after_update(
                case, step, before, gradients, keys, flushes=may_flush, from_stored=from_stored
            ).items():
                values = numbers(case, after[name])
                for quantity, end in ends.items():
                    found.setdefault(quantity, []).append((values[quantity], end))
            before = after
    except FAILURES as error:
        raise FailedRunError(f"{at}: {described(error)}") from error
    return found


def numbers(case: CodingCase, held: HeldTensor) -> dict[str, np.ndarray]:
    """Return what stored arrays stand for, float64, by quantity."""
    return {
        "parameter": number(held.parameter, held.compensation, case.storage.compensation),
        **{name: decoded(*field) for name, field in held.fields.items()},
    }


def rows(case: CodingCase, backend: str, found: dict[str, list[tuple[np.ndarray, Ends]]]) -> Iterator[Row]:
    """Yield a row for each quantity, over all updates and tensors."""
    dtypes = dict(zip([field.name for field in case.rule.fields], case.field_dtypes, strict=True))
    for quantity, pairs in found.items():
        value, true, error = (
            np.concatenate([each.reshape(-1) for each in of])
            for of in zip(*((value, ends.value, ends.error) for value, ends in pairs), strict=True)
        )
        unit = functools.partial(stored_spacing, case.dtype, case.storage.compensation)
        if quantity != "parameter":
            unit = functools.partial(spacing, "float32" if dtypes[quantity] == "8bit" else dtypes[quantity])
        bound = Bound(float(np.linalg.norm(error)), error)
        yield against(case.name, backend, UPDATES, quantity, value, true, bound, unit)
