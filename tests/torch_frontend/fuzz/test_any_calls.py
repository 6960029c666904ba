"""A user's calls in any order: every outcome equals the plain loop's, bit for bit, or is refused in time."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.support.random_graphs import Graph, Part
from tests.support.random_programs import MODES, is_drawn
from tests.support.rows import rows
from tests.support.twins import Twins
from tests.support.worlds import Mode, Settings

GRAPHS = [
    Graph((Part(), Part("norm"), Part())),
    Graph((Part("table"), Part(), Part("again", 1), Part("norm", sometimes=True))),
    Graph((Part("dropout"), Part(wrap="reentrant"), Part(frozen=True)), leaf=True, loss="two"),
    Graph((Part(), Part("norm", wrap="reentrant", sometimes=True), Part(wrap="reentrant"))),
    Graph((Part("pair", wrap="checkpoint"), Part("scalar", sometimes=True), Part("unused"))),
]

parts = st.integers(0, 2)
flags = st.booleans()


class AnyCalls(RuleBasedStateMachine):
    """The calls of `Twins`, which judge themselves."""

    twins: Twins

    @initialize(
        graph=st.sampled_from(GRAPHS),
        mode=st.one_of(st.just(Mode()), st.sampled_from(MODES)),
        rule=st.sampled_from([0, 1, 2]),
        outside=flags,
    )
    def release(self, graph: Graph, mode: Mode, rule: int, outside: bool) -> None:
        self.graph, self.mode = graph, mode
        self.twins = Twins(graph, Settings(rule, outside=outside and mode.exact_norm is None), mode)

    def call(self, name: str, /, **arguments: Any) -> None:
        if is_drawn(self.graph, name, arguments):
            getattr(self.twins, name)(**arguments)

    @rule(last=flags, retain=flags)
    def backward(self, last: bool, retain: bool) -> None:
        self.call("backward", last=last, retain=retain)

    @precondition(lambda self: self.mode.guarded)
    @rule()
    def backward_without_guard(self) -> None:
        self.call("backward", guarded=False)

    @rule(part=parts, in_forward=flags, second_pass=flags)
    def backward_that_fails(self, part: int, in_forward: bool, second_pass: bool) -> None:
        self.call("backward", fail=part, in_forward=in_forward, second_pass=second_pass)

    @rule(part=parts, last=flags)
    def backward_that_overflows(self, part: int, last: bool) -> None:
        self.call("backward", spoil=part, last=last)

    @rule(part=parts)
    def backward_of_a_layer_frozen_meanwhile(self, part: int) -> None:
        self.call("backward", freeze=part)

    @rule()
    def backward_of_the_same_graph(self) -> None:
        self.call("again")

    @rule()
    def backward_paused(self) -> None:
        self.call("paused")

    @rule()
    def step(self) -> None:
        self.call("step")

    @rule()
    def zero_grad(self) -> None:
        self.call("zero_grad")

    @rule()
    def step_and_zero_grad(self) -> None:
        """As most loops do."""
        for name in ("step", "update_scale", "zero_grad"):
            self.call(name)

    @rule(how=st.sampled_from(["model", "one", "zeros"]))
    def clear_gradients(self, how: str) -> None:
        self.call("clear_gradients", how=how)

    @rule(declared=flags)
    def clip(self, declared: bool) -> None:
        self.call("clip", declared=declared)

    @rule()
    def scale_a_gradient(self) -> None:
        self.call("scale_a_gradient")

    @precondition(lambda self: self.mode.scaled)
    @rule(name=st.sampled_from(["unscale", "update_scale"]))
    def scaler(self, name: str) -> None:
        self.call(name)

    @rule(name=st.sampled_from(["round_trip", "save", "load", "remove", "add_group", "evaluate", "grad_values"]))
    def other_call(self, name: str) -> None:
        self.call(name)

    @rule(name=st.sampled_from(["lr", "weight_decay", "eps"]))
    def set_setting(self, name: str) -> None:
        self.call("set_setting", name=name)

    @rule(part=parts)
    def freeze_or_unfreeze(self, part: int) -> None:
        self.call("freeze", part=part)

    @rule(part=parts, value=st.sampled_from([0.9, 0.0]))
    def write_a_parameter(self, part: int, value: float) -> None:
        self.call("write", part=part, value=value)

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.twins.finish()


@pytest.mark.parametrize("number", rows(range(20), range(3).__contains__))
def test_any_calls_are_equal_in_every_bit_or_refused_in_time(number: int) -> None:
    settings = hypothesis.settings(
        max_examples=40,
        stateful_step_count=25,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(hypothesis.seed(number)(AnyCalls), settings=settings)
