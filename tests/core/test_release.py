"""The state machine, carried out on numpy arrays, follows the reference through any sequence of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rules import ADAM_FAMILY

from penstock.core.array_ops import numpy_ops
from penstock.core.errors import RefusedError
from penstock.core.reference import EndOfStep, Gradient, Reference, Settings
from penstock.core.release import Action, Decision, GradientReady, Ledger, Policy, Status, Step, ZeroGrad, decide
from penstock.core.rules import ADAMW, STABLE_ADAMW
from penstock.core.rules.adam_family import AdamHyperparameters, bias_corrections
from penstock.core.update import accumulate, apply, init_state, update

CURRENT = AdamHyperparameters(learning_rate=1e-2, **{**STABLE_ADAMW.defaults, "weight_decay": 0.1})
ACCUMULATION = {Policy.RELEASE: None, Policy.HOLD: "hold", Policy.STATE: "state"}
NAMES = ("a", "b", "c")


class Model:
    """Carries out decisions on numpy arrays: the shortest frontend there can be."""

    def __init__(self, rule_name: str, policy: Policy, strict: bool) -> None:
        self.rule, self.policy, self.strict = ADAM_FAMILY[rule_name], policy, strict
        generator = np.random.default_rng(0)
        self.parameters = {name: generator.normal(size=4) for name in NAMES}
        wide = ("float64", "float64")
        self.states = {name: init_state(numpy_ops, ADAMW, p, wide, "none") for name, p in self.parameters.items()}
        self.steps = dict.fromkeys(NAMES, 0)
        self.status = dict.fromkeys(NAMES, Status.IDLE)
        self.gradients: dict[str, np.ndarray] = {}
        self.ledger = Ledger()

    def gradient(self, name: str, value: np.ndarray, last: bool) -> None:
        self.gradients[name] = self.gradients[name] + value if name in self.gradients else value
        self.ledger.arrive(name, value.nbytes)
        self._do(name, decide(self.policy, self.status[name], GradientReady(last), strict=self.strict))

    def step(self) -> None:
        for name in NAMES:
            self._do(name, decide(self.policy, self.status[name], Step(), strict=self.strict))

    def _do(self, name: str, decision) -> None:
        action, p, state = decision.action, self.parameters[name], self.states[name]
        corrections = bias_corrections(CURRENT, self.steps[name] + 1, np)
        if action is Action.APPLY:
            self.parameters[name], self.states[name] = apply(numpy_ops, self.rule, CURRENT, corrections, "none", p, state)
        elif action.steps:
            self.parameters[name], self.states[name] = update(
                numpy_ops, self.rule, CURRENT, corrections, "none", p, self.gradients[name], state, first=action.first
            )
        elif action in (Action.ACCUMULATE, Action.ACCUMULATE_FIRST):
            self.states[name] = accumulate(
                numpy_ops, self.rule, CURRENT, corrections, "none", p, self.gradients[name], state, first=action.first
            )
        self.steps[name] += action.steps
        if action.frees:
            self.gradients.pop(name, None)
            self.ledger.free(name)
        self.status[name] = decision.status


@st.composite
def groups(draw: st.DrawFn) -> list[list[tuple[str, ...]]]:
    """Updates of one to three micro-batches, each with gradients of some of the tensors, in some order."""
    micro_batch = st.lists(st.sampled_from(NAMES), unique=True, max_size=3).map(tuple)
    return draw(st.lists(st.lists(micro_batch, min_size=1, max_size=3), min_size=1, max_size=5))


@pytest.mark.parametrize("rule", ADAM_FAMILY)
@pytest.mark.parametrize("policy", ACCUMULATION)
@pytest.mark.parametrize("sync", [False, True], ids=["until step", "last known"])
@given(updates=groups())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_sequence_of_updates_equals_the_reference(rule: str, policy: Policy, sync: bool, updates) -> None:
    model = Model(rule, policy, strict=True)
    s = Settings(rule, 1e-2, (0.9, 0.99), 1e-6, 0.1, accumulation=ACCUMULATION[policy])
    reference = Reference(s, model.parameters)
    generator = np.random.default_rng(1)
    for micro_batches in updates:
        if policy is Policy.RELEASE:
            micro_batches = micro_batches[:1]
        for number, names in enumerate(micro_batches):
            last = policy is Policy.RELEASE or (sync and number == len(micro_batches) - 1)
            for name in names:
                value = generator.normal(size=4)
                model.gradient(name, value, last)
                reference.run(Gradient(name, value, last))
        model.step()
        reference.run(EndOfStep())
        assert not model.gradients
        assert model.ledger.live == 0
        assert set(model.status.values()) == {Status.IDLE}
        for name in NAMES:
            assert model.steps[name] == reference.tensors[name].t
            np.testing.assert_allclose(model.parameters[name], reference.tensors[name].parameter, rtol=1e-12, atol=1e-13)
    if policy is not Policy.HOLD:
        assert model.ledger.peak <= 4 * 8  # one gradient


@given(events=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans()), max_size=20))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_lenient_machine_never_refuses_and_closes_nothing(events) -> None:
    model = Model("stable_adamw", Policy.STATE, strict=False)
    reference = Reference(Settings("stable_adamw", 1e-2, (0.9, 0.99), 1e-6, 0.1, accumulation="state"), model.parameters)
    generator = np.random.default_rng(2)
    for name, last, boundary in events:
        value = generator.normal(size=4)
        model.gradient(name, value, last)
        reference.run(Gradient(name, value, last))
        if boundary:
            model.step()
            assert decide(model.policy, model.status[name], ZeroGrad(), strict=False).action is Action.NOTHING
        np.testing.assert_allclose(model.parameters[name], reference.tensors[name].parameter, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("policy", [Policy.RELEASE, Policy.HOLD, Policy.STATE])
def test_a_gradient_after_the_update_is_refused(policy: Policy) -> None:
    status = decide(policy, Status.IDLE, GradientReady(last=True)).status
    assert status is Status.RELEASED
    with pytest.raises(RefusedError, match=r"optimizer\.step\(\).*accumulation"):
        decide(policy, status, GradientReady(last=True))


def test_zero_grad_discards_what_is_held_and_refuses_what_cannot_be_discarded() -> None:
    assert decide(Policy.HOLD, Status.HELD, ZeroGrad()).action is Action.DISCARD
    with pytest.raises(RefusedError, match=r"step\(\) before"):
        decide(Policy.STATE, Status.ACCUMULATED, ZeroGrad())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ACCUMULATION)
def test_a_gradient_that_is_queued_is_used_or_discarded_before_anything_else(policy: Policy, strict: bool) -> None:
    assert decide(policy, Status.QUEUED, ZeroGrad(), strict=strict) == Decision(Action.DISCARD, Status.IDLE)
    for event in (GradientReady(), Step(), Step(waiting=True)):
        with pytest.raises(ValueError, match="must be used first"):
            decide(policy, Status.QUEUED, event, strict=strict)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("policy", "status"),
    [(policy, Status.IDLE) for policy in ACCUMULATION] + [(Policy.STATE, Status.ACCUMULATED)],
)
def test_a_gradient_that_must_not_be_used_never_enters_the_moments(policy: Policy, last: bool, status: Status) -> None:
    decision = decide(policy, status, GradientReady(last, finite=False))
    if policy is Policy.HOLD and not last:
        assert decision.action is Action.KEEP  # judged when it is used
        return
    expected = Action.APPLY if status is Status.ACCUMULATED and last else Action.DISCARD
    assert decision.action is expected
    assert decision.status is (Status.RELEASED if last or policy is Policy.RELEASE else status)


def test_the_ledger_counts_a_gradient_that_grows_once() -> None:
    ledger = Ledger()
    ledger.arrive("a", 100)
    ledger.arrive("a", 100)
    ledger.arrive("b", 50)
    assert (ledger.live, ledger.peak) == (150, 150)
    ledger.free("a")
    ledger.free("a")
    assert (ledger.live, ledger.peak) == (50, 150)
    ledger.reset_peak()
    assert ledger.peak == 50


@pytest.mark.parametrize("status", list(Status))
def test_a_paused_gradient_is_kept_and_loses_nothing(status: Status) -> None:
    decision = decide(Policy.PAUSE, status, GradientReady(last=False))
    assert decision.action is Action.KEEP
    assert decision.status is (Status.HELD if status is Status.IDLE else status)
    if status is Status.ACCUMULATED:
        assert decide(Policy.STATE, decision.status, Step(waiting=True)).action is Action.UPDATE_LAST
        assert decide(Policy.STATE, decision.status, Step(waiting=True, finite=False)).action is Action.APPLY
    if status is Status.RELEASED:
        with pytest.raises(RefusedError, match="zero_grad"):
            decide(Policy.RELEASE, decision.status, Step(waiting=True))
