"""The section "conversion": state that crosses frameworks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...core.compensation import resolve
from ...core.dtypes import PARAMETER_DTYPES
from ...core.rules import RULES
from ..backends.protocol import Backend
from ..cases import SETTINGS, Case, Problem, storages
from ..compare import Row, rows
from ..truth import truths
from .routes import BACKENDS, HALF, ROUTES, ConversionCase, travel

SETTING = next(setting for setting in SETTINGS if setting.name == "shapes")
"""Tensors of odd shapes, 0-d and zero-size among them."""


class Conversion:
    """See `parity.sections.Section`."""

    name = "conversion"
    title = "State that crosses frameworks: the same bits there and back, and a run that goes on within its bounds"

    def cases(self, *, quick: bool) -> list[ConversionCase]:
        """See `Section`. Every route, rule, dtype and compensation; in a quick run the routes and rules take turns."""
        found = []
        for dtype in PARAMETER_DTYPES:
            for turn, rule in enumerate(RULES.values()):
                problem = Problem(SETTING, rule, dtype)
                for storage in storages(dtype, state_dtypes=False):
                    if not quick:
                        found += [ConversionCase(route, Case(problem, storage)) for route in ROUTES]
                    elif storage.compensation == resolve("auto", dtype):
                        number = (turn + PARAMETER_DTYPES.index(dtype)) % len(RULES)
                        if number == 0:
                            found += [ConversionCase(ROUTES[turn % 2], Case(problem, storage))]
        return found

    def parts(self, cases: Sequence[ConversionCase], backends: Sequence[Backend]) -> int:
        """See `Section`."""
        return len({each.case.problem for each in cases}) + len(cases)

    def run(
        self,
        backends: Sequence[Backend],
        cases: Sequence[ConversionCase],
        steps: Sequence[int],
        progress: Callable[[str, str], None],
    ) -> Iterator[Row]:
        """See `Section`. A route runs where the backends of both its ends were chosen."""
        chosen = {backend.name for backend in backends}
        for problem, group in itertools.groupby(cases, key=lambda each: each.case.problem):
            members = list(group)
            progress(members[0].name, "reference")
            (truth,) = truths(problem, list({each.case.storage for each in members}), [2 * HALF]).values()
            for conversion in members:
                end = BACKENDS[conversion.route[1]]
                progress(conversion.name, end)
                if not {BACKENDS[side] for side in conversion.route} <= chosen:
                    continue
                try:
                    promises, held = travel(conversion)
                except Exception as error:
                    yield _failed(conversion.name, end, f"{type(error).__name__}: {error}")
                    continue
                for promise in promises:
                    yield _identical(conversion.name, end, promise.quantity, promise.one, promise.other)
                for row in rows(conversion.case, end, held, truth):
                    yield dataclasses.replace(row, case=conversion.name)


def _identical(case: str, backend: str, quantity: str, one: np.ndarray, other: np.ndarray) -> Row:
    bits = np.dtype(f"u{one.dtype.itemsize}")
    count = int(np.count_nonzero(one.view(bits) != other.view(bits)))
    return Row(case, backend, HALF, quantity, count / max(one.size, 1), 0.0, count, 0.0, math.inf if count else 0.0)


def _failed(case: str, backend: str, failure: str) -> Row:
    nan = math.nan
    return Row(case, backend, HALF, "state", nan, nan, nan, nan, nan, failure)
