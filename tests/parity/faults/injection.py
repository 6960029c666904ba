"""Wrong programs for the suite: a backend that starts its runs with another case, or whose runs do something more.

A fault is a function (start, case) -> run: `start` is the backend's own method. It needs no private name of the library, and
is injected as a backend of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.parity import backends as registry
from penstock.parity.report.terminal import complaint, summary
from penstock.parity.sections import SECTIONS
from penstock.parity.suite import Result, run_sections

Wrong = Callable[[Callable[[Any], Any], Any], Any]

METHODS = {
    "codings": "start_codings",
    "events": "start_events",
    "identity": "start_events",
    "trajectories": "start_trajectory",
    "marker": "start_markers",
    "memory": "measure_memory",
}
"""What starts the runs of a section; of the others it is `start`."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, and where it shows.

    name: what is wrong. case: of the section that catches it. backend: on which. steps: of plain updates. method: if the
    fault is not in what usually starts the runs of the section.
    """

    name: str
    case: str
    backend: str
    wrong: Wrong
    steps: int = 3
    method: str | None = None


def right(start: Callable[[Any], Any], case: Any) -> Any:
    """No fault."""
    return start(case)


def run(fault: Fault) -> Result:
    """The case of a fault, through the suite; with the backend that it is compared with where the section compares two."""
    ((section, case),) = ((s, case) for s in SECTIONS for case in s.cases(quick=False) if case.name == fault.case)
    names = ["eager", "jax"] if section.name == "frameworks" else [fault.backend]
    backends = []
    for backend in registry.choose(names)[0]:
        if backend.name == fault.backend:
            method = fault.method or METHODS.get(section.name, "start")
            correct = getattr(backend, method)
            backend = copy.copy(backend)
            setattr(backend, method, functools.partial(fault.wrong, correct))
        backends.append(backend)
    return run_sections(backends, [(section, [case])], (fault.steps,))


def caught(fault: Fault, result: Result) -> bool:
    """Whether the report names the case and the backend, for numbers that are wrong and not for an exception."""
    numbers = {complaint(row) for row in result.broken if row.failure is None}
    return any(sentence.startswith(f"{fault.case} on {fault.backend} after ") for sentence in numbers & set(summary(result)))


# -- how runs go wrong --------------------------------------------------------------------------------------------------


class Tampered:
    """A run some of whose methods are replaced; a wrong one gets the run and the correct method before its arguments."""

    def __init__(self, given: Any, **methods: Callable[..., Any]) -> None:
        self.given, self.methods = given, methods

    def __getattr__(self, name: str) -> Any:
        correct = getattr(self.given, name)
        return functools.partial(self.methods[name], self.given, correct) if name in self.methods else correct


def tampered(**methods: Callable[..., Any]) -> Wrong:
    """Runs with wrong methods."""
    return lambda start, case: Tampered(start(case), **methods)


def another_case(change: Callable[[Any], Any]) -> Wrong:
    """The runs of another case."""
    return lambda start, case: start(change(case))


def problem(**changes: Any) -> Wrong:
    """The runs of another problem: by field of `Problem`, what becomes of its value."""

    def changed(case: Any) -> Any:
        new = {name: change(getattr(case.problem, name)) for name, change in changes.items()}
        return dataclasses.replace(case, problem=dataclasses.replace(case.problem, **new))

    return another_case(changed)


def values(**fields: Any) -> Callable[[Any], Any]:
    """A dataclass with other values of some fields."""
    return lambda given: dataclasses.replace(given, **fields)


def rule(**fields: Any) -> Wrong:
    """The runs of another rule."""
    return problem(rule=values(**fields))


def defaults(**changes: Any) -> Wrong:
    """The runs of a rule with other defaults."""
    return problem(rule=lambda given: dataclasses.replace(given, defaults={**given.defaults, **changes}))


def setting(**fields: Any) -> Wrong:
    """The runs of another setting."""
    return problem(setting=values(**fields))


def hyperparameters(change: Callable[[Any, int], Any]) -> Wrong:
    """The runs with other hyperparameters: `change` is given the problem and the number of the step."""

    def changed(case: Any) -> Any:
        given = case.problem
        wrong = type("Wrong", (type(given),), {"hyperparameters_at": lambda own, step: change(given, step)})
        return dataclasses.replace(case, problem=wrong(given.setting, given.rule, given.dtype))

    return another_case(changed)


def sequence(**fields: Any) -> Wrong:
    """The runs of another sequence of events."""
    return another_case(lambda case: dataclasses.replace(case, sequence=dataclasses.replace(case.sequence, **fields)))


Gradients = dict[str, list[np.ndarray]]


def with_gradients(case: Any, change: Callable[[Any, Gradients], Gradients]) -> Any:
    """A case of events with other gradients: `change` is given the pass and the right ones."""

    def wrong(own: Any, number: int, event: Any) -> Gradients:
        return change(event, case.gradients(number, event))

    return type("Wrong", (type(case),), {"gradients": wrong})(case.sequence, case.rule, case.dtype)


def multiplied(given: Gradients, factor: Callable[[str], Any]) -> Gradients:
    """Gradients times a factor for each tensor, in their dtype."""
    return {name: [np.asarray(use * factor(name), use.dtype) for use in uses] for name, uses in given.items()}


def scaled(by: Callable[[Gradients], float], **fields: Any) -> Wrong:
    """The runs of a case whose gradients are multiplied by something, and whose sequence has other values of some fields."""

    def changed(case: Any) -> Any:
        case = dataclasses.replace(case, sequence=dataclasses.replace(case.sequence, **fields))
        return with_gradients(case, lambda event, given: multiplied(given, lambda name: by(given)))

    return another_case(changed)


def before_step(do: Callable[[Any], None], method: str = "step") -> Wrong:
    """Something is done to a run before each step."""

    def wrong(run: Any, correct: Callable[..., Any], *arguments: Any) -> Any:
        do(run)
        return correct(*arguments)

    return tampered(**{method: wrong})


def after_step(do: Callable[[Any, Mapping[str, np.ndarray], Any], None], method: str = "step") -> Wrong:
    """Something is done to a run after each step; `do` gets the parameters before it, and the step's argument, too."""

    def wrong(run: Any, correct: Callable[..., Any], argument: Any) -> None:
        before = parameters(run)
        correct(argument)
        do(run, before, argument)

    return tampered(**{method: wrong})


# -- what runs on numpy and on PyTorch hold -----------------------------------------------------------------------------


def parameters(run: Any) -> dict[str, np.ndarray]:
    """Copies of the parameters of a run, float64."""
    return {name: np.array(_array(value), np.float64) for name, value in run.parameters.items()}


def put(run: Any, name: str, value: np.ndarray) -> None:
    """Replace a parameter."""
    old = run.parameters[name]
    if isinstance(old, np.ndarray | np.generic):
        run.parameters[name] = np.asarray(value).astype(old.dtype)
    else:
        import torch

        old.data.copy_(torch.from_numpy(np.asarray(value)))  # unseen by release, which refuses a write before step()


def kept(run: Any, name: str, field: str) -> np.ndarray:
    """What a run keeps for a parameter, float64."""
    if hasattr(run, "states"):
        return np.asarray(_fields(run, name)[field], np.float64)
    return np.asarray(_array(_state(run, name)[field]), np.float64)


def _fields(run: Any, name: str) -> dict[str, Any]:
    """The fields that a run of the specification keeps for a parameter, by name."""
    problem = run.case.problem() if callable(run.case.problem) else run.case.problem
    return {field.name: kept for field, kept in zip(problem.rule.fields, run.states[name].fields, strict=True)}


def _state(run: Any, name: str) -> dict[str, Any]:
    from penstock.parity.backends.torch_arguments import kept_by

    parameter = run.parameters[name]
    return run.optimizer.state[parameter] | kept_by(run.optimizer, parameter)


def change_kept(run: Any, field: str, change: Callable[[Any], Any], *names: str) -> None:
    """Replace what a run keeps for some parameters, or for all."""
    for name in names or tuple(run.parameters):
        if hasattr(run, "states"):
            state, fields = run.states[name], _fields(run, name)
            old = fields[field] if field in fields else getattr(state, field)
            new = np.asarray(change(old)).astype(np.asarray(old).dtype)
            of_rule = {"fields": tuple(({**fields, field: new}).values())}
            run.states[name] = state._replace(**(of_rule if field in fields else {field: new}))
        else:
            state = _state(run, name)
            if field in state:
                state[field].copy_(change(state[field].clone()))


def _array(value: Any) -> Any:
    from penstock.parity.backends.torch_arguments import to_numpy

    return to_numpy(value) if hasattr(value, "detach") else value
