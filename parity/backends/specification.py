"""The backend "numpy": the specification itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...core.array_ops import numpy_ops
from ...core.hyperparameters import Hyperparameters
from ...core.update import TensorState, init_state, rebiased, update
from ..cases import Case
from .protocol import Held

if TYPE_CHECKING:
    from ..codings import CodingCase, CodingRun
    from ..events import EventCase, EventRun


class NumpyRun:
    """`core.update` on numpy arrays."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.count = 0
        self.parameters = dict(case.problem.initial_parameters())
        dtypes = case.storage.moments(case.problem)
        self.states: dict[str, TensorState] = {
            name: init_state(numpy_ops, case.problem.rule, parameter, dtypes, case.storage.compensation)
            for name, parameter in self.parameters.items()
        }

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.count += 1
        problem = self.case.problem
        given = problem.hyperparameters_at(self.count)
        if problem.changes_betas and self.count > 1:
            self._change_betas(problem.hyperparameters_at(self.count - 1), given)
        with np.errstate(invalid="ignore", under="ignore"):  # NaN and infinities, where the gradients have them
            for name, gradient in gradients.items():
                self.parameters[name], self.states[name] = update(
                    numpy_ops,
                    problem.rule,
                    given[name],
                    problem.rule.corrections(given[name], self.count, np),
                    self.case.storage.compensation,
                    self.parameters[name],
                    gradient,
                    self.states[name],
                )

    def _change_betas(self, before: Mapping[str, Hyperparameters], after: Mapping[str, Hyperparameters]) -> None:
        for name, state in self.states.items():
            decays = map(self.case.problem.rule.decays, (before[name], after[name]))
            fields = [
                field if old is None else rebiased(numpy_ops, field, self.count - 1, old, new)
                for field, old, new in zip(state.fields, *decays, strict=True)
            ]
            self.states[name] = state._replace(fields=tuple(fields))

    def held(self) -> dict[str, Held]:
        held = {}
        for name, parameter in self.parameters.items():
            state = self.states[name]
            kept = zip((field.name for field in self.case.problem.rule.fields), state.fields, strict=True)
            held[name] = Held(parameter, state.compensation, **dict(kept))
        return held


class NumpyBackend:
    """The backend "numpy"."""

    name = "numpy"
    norm_eps = 0.0
    abilities = frozenset({"schedules", "groups", "decoupled decay", "changing betas"})

    def unavailable(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        return None

    def start(self, case: Case) -> NumpyRun:
        return NumpyRun(case)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return None

    def start_codings(self, case: CodingCase) -> CodingRun:
        from ..codings.numpy_runs import NumpyCodings

        return NumpyCodings(case)

    def refuses_events(self, case: EventCase) -> str | None:
        return None

    def start_events(self, case: EventCase) -> EventRun:
        from ..events.specification import NumpyEvents

        return NumpyEvents(case)
