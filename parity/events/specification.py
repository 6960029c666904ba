"""Event sequences on the backend "numpy": the state machine and the update of `core`."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.array_ops import numpy_dtype, numpy_ops
from ...core.dtypes import compute_dtype
from ...core.release import Action, GradientReady, Ledger, Policy, Status, ZeroGrad, decide
from ...core.release import Step as StepEvent
from ...core.update import TensorState, accumulate, apply, init_state, update
from ..backends.protocol import Held
from .recorded import SHAPES, Backward, Event, EventCase, LearningRate, Step

POLICIES = {None: Policy.RELEASE, "hold": Policy.HOLD, "state": Policy.STATE}


class NumpyEvents:
    """A minimal frontend: parameters, statuses, gradients and a ledger."""

    def __init__(self, case: EventCase) -> None:
        self.case = case
        self.policy = POLICIES[case.sequence.accumulation]
        self.hyperparameters = case.hyperparameters()
        self.parameters = case.initial_parameters()
        self.states: dict[str, TensorState] = {
            name: init_state(numpy_ops, case.rule, parameter, case.moments, case.storage.compensation)
            for name, parameter in self.parameters.items()
        }
        self.counts = dict.fromkeys(SHAPES, 0)
        self.status = dict.fromkeys(SHAPES, Status.IDLE)
        self.waiting: dict[str, np.ndarray] = {}
        self.ledger = Ledger()
        self.passes = 0

    def run(self, event: Event) -> None:
        if isinstance(event, Backward):
            gradients = {name: _sum(uses) for name, uses in reversed(self.case.gradients(self.passes, event).items())}
            self.passes += 1
            self._backward(event, gradients)
        elif isinstance(event, LearningRate):
            self.hyperparameters = self.case.hyperparameters(event.value)
        elif isinstance(event, Step):
            self._step()
        else:
            for name in SHAPES:
                self._do(name, decide(self.policy, self.status[name], ZeroGrad()).action)
            self.status = dict.fromkeys(SHAPES, Status.IDLE)

    def held(self) -> dict[str, Held]:
        names = [field.name for field in self.case.rule.fields]
        return {
            name: Held(parameter, state.compensation, **dict(zip(names, state.fields, strict=True)))
            for (name, parameter), state in zip(self.parameters.items(), self.states.values(), strict=True)
        }

    def updates(self) -> dict[str, int]:
        return dict(self.counts)

    def live_bytes(self) -> tuple[int, int]:
        """Return the bytes of held gradients, and those in the ledger."""
        return sum(gradient.nbytes for gradient in self.waiting.values()), self.ledger.live

    def save(self) -> bytes:
        return pickle.dumps((self.parameters, self.states, self.counts, self.passes, self.hyperparameters))

    def load(self, saved: bytes) -> None:
        self.parameters, self.states, self.counts, self.passes, self.hyperparameters = pickle.loads(saved)

    def _backward(self, event: Backward, gradients: Mapping[str, np.ndarray]) -> None:
        sequence = self.case.sequence
        factors: tuple[Any, ...] = ()
        if sequence.measures and self.policy is Policy.RELEASE:
            scale = np.asarray(sequence.loss_scale or 1.0, numpy_dtype(self.case.dtype))
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
            for name, gradient in gradients.items():  # a pass that only measures, and frees each gradient
                self.ledger.arrive_and_free(name, gradient.nbytes)
            if not all(map(_finite, gradients.values())):
                return
            factors = (1.0 / scale, self._clip(gradient / scale for gradient in gradients.values()))
        for name, gradient in gradients.items():
            before = self.waiting.get(name)
            self.waiting[name] = gradient if before is None else before + gradient
            self.ledger.arrive(name, gradient.nbytes)
            last = sequence.is_last(event)
            kept = event.paused or (self.policy is Policy.HOLD and not last)
            finite = kept or not sequence.skips or _finite(self.waiting[name])
            policy = Policy.PAUSE if event.paused else self.policy
            decision = decide(policy, self.status[name], GradientReady(last, finite))
            self._do(name, decision.action, self._factors_of(name) if sequence.clips_each else factors)
            self.status[name] = decision.status

    def _step(self) -> None:
        sequence = self.case.sequence
        pending = [name for name in SHAPES if name in self.waiting or self.status[name] is not Status.IDLE]
        usable = {name: not sequence.skips or _finite(self.waiting[name]) for name in self.waiting}
        if all(self.status[name] is Status.HELD for name in pending) and not all(usable.values()):
            usable = dict.fromkeys(usable, False)  # nothing was used yet: all or none
        factors = (self._clip(self.waiting.values()),)
        for name in pending:
            event = StepEvent(usable.get(name, True), waiting=name in self.waiting)
            action = decide(self.policy, self.status[name], event).action
            self._do(name, action, self._factors_of(name) if sequence.clips_each else factors)
        self.status = dict.fromkeys(SHAPES, Status.IDLE)

    def _factors_of(self, name: str) -> tuple[Any, ...]:
        """Return the clip factor of one tensor's gradient; empty without a gradient."""
        return (self._clip([self.waiting[name]]),) if name in self.waiting else ()

    def _clip(self, gradients: Iterable[np.ndarray]) -> Any:
        """Return the clip factor of the common norm of these gradients."""
        compute = numpy_dtype(compute_dtype(self.case.dtype))
        norm = np.sqrt(sum((np.sum(gradient.astype(compute) ** 2) for gradient in gradients), compute.type(0.0)))
        largest = self.case.sequence.max_norm
        return compute.type(1.0) if largest is None or norm <= largest else compute.type(largest) / norm

    def _do(self, name: str, action: Action, factors: tuple[Any, ...] = ()) -> None:
        """Carry out an action."""
        given, parameter, state = self.case, self.parameters[name], self.states[name]
        rule, compensation = given.rule, given.storage.compensation
        uses = action.steps or action in (Action.ACCUMULATE, Action.ACCUMULATE_FIRST)
        corrections = rule.corrections(self.hyperparameters, self.counts[name] + 1, np)
        if action is Action.APPLY:
            new = apply(numpy_ops, rule, self.hyperparameters, corrections, compensation, parameter, state)
            self.parameters[name], self.states[name] = new
        elif uses:
            gradient = self.waiting[name]
            for factor in factors:
                gradient = (gradient.astype(numpy_dtype(compute_dtype(given.dtype))) * factor).astype(gradient.dtype)
            shared = (numpy_ops, rule, self.hyperparameters, corrections, compensation, parameter, gradient, state)
            if action.steps:
                self.parameters[name], self.states[name] = update(*shared, first=action.first)
            else:
                self.states[name] = accumulate(*shared, first=action.first)
        self.counts[name] += action.steps
        if action.frees:
            self.waiting.pop(name, None)
            self.ledger.free(name)


def _finite(gradient: np.ndarray) -> bool:
    return bool(np.isfinite(gradient.astype(np.float64)).all())


def _sum(uses: list[np.ndarray]) -> np.ndarray:
    """Return the gradient of a parameter with several uses: the sum, in their dtype."""
    total = uses[0]
    for use in uses[1:]:
        total = total + use
    return total
