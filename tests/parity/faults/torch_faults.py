"""Faults in the torch frontend: the eager backend, groups and state, and the release hooks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.core.release import Action, Decision, Policy, Status, machine
from penstock.torch_frontend import state as saved_state
from penstock.torch_frontend import updates
from penstock.torch_frontend.backends import eager
from penstock.torch_frontend.backends.eager import EagerBackend
from penstock.torch_frontend.clipping import clip_by_norm_
from penstock.torch_frontend.release import conditioning, lifecycle
from penstock.torch_frontend.release.launches import Launches
from penstock.torch_frontend.release.lifecycle import Lifecycle
from penstock.torch_frontend.release.nonfinite import NonFinite
from penstock.torch_frontend.release.release import Release
from penstock.torch_frontend.updates import TensorUpdates

from .planting import Fault, Plant, both, instead, value


def _first_group_for_all(correct: Any, self: Any, parameters: Any) -> Any:
    return dict.fromkeys(correct(self, parameters), self.param_groups[0])


def _groups_of_the_first_look(correct: Any, self: Any, parameters: Any) -> Any:
    return self.__dict__.setdefault("_stale", correct(self, parameters))


def _counts_every_micro_batch(correct: Any, self: Any, tasks: Any, **how: Any) -> Any:
    applied = correct(self, tasks, **how)
    for parameter, _, action in tasks:
        if not action.steps:
            self.state[parameter]["step"] += 1
    return applied


def _counts_skipped(correct: Any, self: Any, skipped: int = 1) -> None:
    correct(self, skipped)
    if skipped:
        for state in self._optimizer.state.values():
            state["step"] += 1


def _skips_with_zeros(correct: Any, self: Any, gradients: Any) -> Any:
    for gradient in gradients.values():
        if not bool(torch.isfinite(gradient).all()):
            gradient.zero_()
    return correct(self, gradients)


def _kept_alive(correct: Any, self: Any, parameter: Any) -> None:
    self.__dict__.setdefault("_forgotten", []).append(parameter.grad)
    correct(self, parameter)


def _booked_out_twice(correct: Any, self: Any, parameter: Any) -> None:
    nbytes = self.ledger._held.get(parameter, 0)
    correct(self, parameter)
    self.ledger.live -= nbytes


def _used_twice(correct: Any, self: Any, decided: Any, **how: Any) -> Any:
    twice = [(p, g, d) for p, g, d in decided if d.action is Action.UPDATE and p.ndim == 2]
    return correct(self, [*twice, *decided], **how)


def _averaged(correct: Any, self: Any, gradients: Any, decisions: Any, **how: Any) -> None:
    for gradient in gradients.values():
        gradient.div_(4)
    correct(self, gradients, decisions, **how)


def _clipped_on_arrival(correct: Any, self: Any, parameter: Any) -> None:
    if parameter.grad is not None:
        clip_by_norm_([parameter.grad], 1.0)
    correct(self, parameter)


def _l2_on_arrival(correct: Any, self: Any, parameter: Any) -> None:
    """Added to what is scaled, measured and clipped."""
    if parameter.grad is not None:
        parameter.grad.add_(parameter, alpha=self.optimizer.group_of(parameter)["weight_decay"])
    correct(self, parameter)


def _without_l2(correct: Any, self: Any, first: bool, parameter: Any) -> Any:
    return correct(self, False, parameter)


_L2_BEFORE_THE_REST: Plant = both(
    instead(Release, "on_gradient", _l2_on_arrival), instead(eager._Piece, "gradient", _without_l2)
)


def _forgets_compensation(correct: Any, final: Any, groups: Any, state: Any) -> None:
    correct(final, groups, state)
    for tensors in state.values():
        tensors["compensation"].zero_()


def _mean_square_over_a_piece(correct: Any, self: Any, slot: Any, gradient: Any, first: bool, scale: Any) -> Any:
    total = correct(self, slot, gradient, first, scale)
    return total * gradient.numel() / min(gradient.numel(), eager.PIECE["cpu"])


def _transition(when: tuple[Policy, Status], wrong: Action) -> Any:
    def decide(correct: Any, policy: Policy, status: Status, event: Any, *, strict: bool = True) -> Decision:
        decision = correct(policy, status, event, strict=strict)
        if (policy, status) == when and isinstance(event, machine.Step) and decision.action.steps:
            return Decision(wrong, decision.status)
        return decision

    return decide


FAULTS = [
    Fault(
        "wrong beta2",
        instead(updates, "hyperparameters", lambda correct, group: dataclasses.replace(correct(group), beta2=0.9985)),
        "trajectories/release/adam/float32",
        "eager",
    ),
    Fault(
        "learning rate of another group",
        instead(TensorUpdates, "_groups", _first_group_for_all),
        "groups/adamw/float32/none/state-default",
        "eager",
    ),
    Fault(
        "stale groups after load_state_dict",
        instead(TensorUpdates, "_groups", _groups_of_the_first_look),
        "identity/frozen/adamw/float32",
        "eager",
    ),
    Fault(
        "settings of the first step for ever",
        instead(
            TensorUpdates,
            "_hyperparameters",
            lambda correct, self, group: self.__dict__.setdefault("_first", {}).setdefault(id(group), correct(self, group)),
        ),
        "schedule/adamw/float32/none/state-default",
        "eager",
    ),
    Fault(
        "resume drops the compensation",
        instead(saved_state, "restore_dtypes", _forgets_compensation),
        "identity/resume/adamw/bfloat16",
        "eager",
    ),
    Fault(
        "second moment in bfloat16 by default",
        instead(
            saved_state,
            "moment_dtypes",
            lambda correct, group, name, checked: correct(group, name, checked)._replace(exp_avg_sq=name),
        ),
        "B/adamw/bfloat16/split/state-default",
        "eager",
        100,
    ),
    Fault(
        "mean square over the elements of a piece",
        instead(EagerBackend, "mean_square", _mean_square_over_a_piece),
        "large/stable_adamw/float32/none/state-default",
        "eager",
    ),
    Fault(
        "L2 added by every micro-batch",
        instead(eager._Piece, "gradient", lambda correct, self, first, parameter: correct(self, True, parameter)),
        "events/state/adam/float32",
        "eager",
    ),
    Fault("L2 added before clipping", _L2_BEFORE_THE_REST, "events/clip/adam/float32", "eager"),
    Fault("L2 added before unscaling", _L2_BEFORE_THE_REST, "events/overflow/adam/float32", "eager"),
    Fault(
        "moments decayed by every micro-batch",
        value(Action, "first", property(lambda action: True)),
        "events/state-last-known/adamw/float32",
        "eager",
    ),
    Fault(
        "step counted for every micro-batch",
        instead(TensorUpdates, "perform_all", _counts_every_micro_batch),
        "events/state/adamw/float32",
        "eager",
    ),
    Fault(
        "step counted where it is skipped",
        instead(NonFinite, "count", _counts_skipped),
        "identity/skip/adamw/float32",
        "eager",
    ),
    Fault(
        "moments decayed by a gradient that is skipped",
        instead(NonFinite, "usable", _skips_with_zeros),
        "events/nonfinite/adamw/float32",
        "eager",
    ),
    Fault("gradient not freed", instead(Lifecycle, "free", _kept_alive), "memory/release", "eager"),
    Fault(
        "gradient of a micro-batch not freed", instead(Lifecycle, "free", _kept_alive), "events/state/adamw/float32", "eager"
    ),
    Fault("gradient freed twice", instead(Lifecycle, "free", _booked_out_twice), "events/release/adamw/float32", "eager"),
    Fault("tied weights released twice", instead(Lifecycle, "carry_out", _used_twice), "events/tied/adamw/float32", "eager"),
    Fault(
        "held gradient averaged instead of summed",
        instead(Launches, "use", _averaged),
        "events/hold/adam/float32",
        "eager",
    ),
    Fault(
        "held gradient discarded at step()",
        instead(lifecycle, "decide", _transition((Policy.HOLD, Status.HELD), Action.DISCARD)),
        "events/hold/adamw/float32",
        "eager",
    ),
    Fault(
        "no step at the end of micro-batches in the moments",
        instead(lifecycle, "decide", _transition((Policy.STATE, Status.ACCUMULATED), Action.NOTHING)),
        "events/state/adamw/float32",
        "eager",
    ),
    Fault(
        "max_norm applied to every micro-batch",
        instead(Release, "on_gradient", _clipped_on_arrival),
        "events/clip-hold/adamw/float32",
        "eager",
    ),
    Fault(
        "small gradients scaled up to max_norm",
        value(conditioning, "clip_coefficient", lambda norm, max_norm: max_norm / (norm + 1e-6)),
        "events/clip/adamw/float32",
        "eager",
    ),
    Fault(
        "gradient not clipped",
        value(conditioning, "clip_coefficient", lambda norm, max_norm: torch.ones_like(norm)),
        "events/clip/stable_adamw/float32",
        "eager",
    ),
    Fault(
        "gradient not unscaled",
        instead(conditioning.Conditioning, "apply", lambda correct, self, gradients: None),
        "events/overflow/adamw/float32",
        "eager",
    ),
]
