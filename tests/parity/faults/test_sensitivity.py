"""Faults, planted one at a time into a backend that is otherwise correct: each must break a bound."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from penstock.commands import parity as command
from penstock.core.array_ops import numpy_dtype
from penstock.parity import Case, register, unregister
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.suite import run

Fault = Callable[[NumpyRun], None]


class FaultyRun(NumpyRun):
    """The specification with hyperparameters, or with a state after every step, that are not what they should be."""

    def __init__(self, case: Case, before: Fault, after: Fault) -> None:
        super().__init__(case)
        self.after = after
        before(self)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        super().step(gradients)
        self.after(self)


class FaultyBackend(NumpyBackend):
    name = "faulty"

    def __init__(self, before: Fault = lambda run: None, after: Fault = lambda run: None) -> None:
        self.before, self.after = before, after

    def start(self, case: Case) -> FaultyRun:
        return FaultyRun(case, self.before, self.after)


def change_rule(**values: object) -> Fault:
    def fault(faulty: NumpyRun) -> None:
        problem = faulty.case.problem
        changed = dataclasses.replace(problem, rule=dataclasses.replace(problem.rule, **values))
        faulty.case = dataclasses.replace(faulty.case, problem=changed)

    return fault


def change_setting(**values: object) -> Fault:
    def fault(faulty: NumpyRun) -> None:
        problem = faulty.case.problem
        changed = dataclasses.replace(problem, setting=dataclasses.replace(problem.setting, **values))
        faulty.case = dataclasses.replace(faulty.case, problem=changed)

    return fault


def cast_state(field: str, dtype: str) -> Fault:
    def fault(faulty: NumpyRun) -> None:
        for name, state in faulty.states.items():
            value = getattr(state, field)
            cast = value.astype(numpy_dtype(dtype)).astype(value.dtype)
            faulty.states[name] = state._replace(**{field: cast})

    return fault


def drop_compensation(faulty: NumpyRun) -> None:
    for name, state in faulty.states.items():
        if state.compensation is not None:
            faulty.states[name] = state._replace(compensation=np.zeros_like(state.compensation))


def count_twice(faulty: NumpyRun) -> None:
    faulty.count = 1


def freeze_one_element(faulty: NumpyRun) -> None:
    for parameter in faulty.parameters.values():
        parameter.flat[:1] = faulty.case.problem.initial_parameters()[next(iter(faulty.parameters))].flat[:1]


FAULTS = {
    "beta1 too low": ("B/adamw/float32/*", FaultyBackend(change_rule(betas=(0.89, 0.999)))),
    "beta2 too low": ("B/adamw/float32/*", FaultyBackend(change_rule(betas=(0.9, 0.998)))),
    "betas of another rule": ("B/stable_adamw/float32/*", FaultyBackend(change_rule(betas=(0.9, 0.999)))),
    "eps of another rule": ("A/adam/float32/*", FaultyBackend(change_rule(eps=1e-6))),
    "decay dropped": ("B/adamw/float32/*", FaultyBackend(change_setting(weight_decay=0.0))),
    "L2 dropped": ("B/adam/float32/*", FaultyBackend(change_setting(weight_decay=0.0))),
    "decay decoupled from L2": ("B/adam/float32/*", FaultyBackend(change_rule(l2=False))),
    "update not clipped": ("B/stable_adamw/float32/*", FaultyBackend(change_rule(clips_update=False))),
    "learning rate a little off": ("B/adamw/float32/*", FaultyBackend(change_setting(lr=1.0001e-4))),
    "exp_avg through float16": ("B/adamw/float32/*", FaultyBackend(after=cast_state("exp_avg", "float16"))),
    "exp_avg_sq through float16": ("B/adamw/float32/*", FaultyBackend(after=cast_state("exp_avg_sq", "float16"))),
    "exp_avg_sq through bfloat16": ("B/stable_adamw/float32/*", FaultyBackend(after=cast_state("exp_avg_sq", "bfloat16"))),
    "float64 through float32": ("A/adamw/float64/*", FaultyBackend(after=cast_state("exp_avg", "float32"))),
    "compensation lost": ("B/adamw/bfloat16/split/*", FaultyBackend(after=drop_compensation)),
    "float16 compensation lost": ("B/adamw/float16/kahan/*", FaultyBackend(after=drop_compensation)),
    "debiased one step late": ("A/adamw/float32/*", FaultyBackend(count_twice)),
    "one element not updated": ("B/adam/float32/*", FaultyBackend(after=freeze_one_element)),
}


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[str]:
    pattern, backend = FAULTS[request.param]
    register(backend)
    yield pattern
    unregister(backend.name)


@pytest.mark.parametrize("planted", FAULTS, indirect=True)
def test_a_planted_fault_breaks_a_bound(planted: str) -> None:
    rows = run(["faulty"], planted, [1, 100])
    assert any(not row.within for row in rows if row.quantity == "parameter")


@pytest.mark.parametrize("planted", ["decay dropped"], indirect=True)
def test_the_command_exits_with_1_and_names_the_case(planted: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(backend=["faulty"], cases="B/adamw/float32/*", quick=True, report=None, modules=[])
    assert command.run(arguments) == 1
    out = capsys.readouterr().out
    assert "BROKEN" in out
    assert "B/adamw/float32/none/state-default on faulty after 1 steps: parameter has relative error" in out
