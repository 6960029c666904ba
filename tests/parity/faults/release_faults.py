"""Faults in gradient release on torch: the pipeline, the boundaries, the ledger, and the marker of a released gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.core.release import Action, Decision, Ledger, Policy, Status, machine
from penstock.torch_frontend.backends.piece import Piece
from penstock.torch_frontend.clipping import clip_by_norm_
from penstock.torch_frontend.release import boundaries, guard, marker, pipeline, stages, step
from penstock.torch_frontend.release.marker import MarkerContext, ReleasedGradient
from penstock.torch_frontend.release.stages import Arrival, ClipEach, Rescale, Skip, Update

from .planting import Fault, Plant, both, instead

RELEASED_ADAMW = "events/release/adamw/float32"


def _left_out(correct: Any, self: Any, arrived: Any) -> None:
    """A stage that hands gradients on as they are."""
    self.following(arrived)


def _counts_skipped(correct: Any, optimizer: Any, skipped: Any, count: int = 1) -> None:
    correct(optimizer, skipped, count)
    if count:
        for state in optimizer.state.values():
            state["step"] += 1


def _finite_as_zeros(correct: Any, gradients: Any, shards: Any, norms: Any) -> Any:
    _zero_what_is_not_finite(gradients)
    return [True] * len(gradients)


def _each_finite_as_zeros(correct: Any, ready: Any) -> Any:
    _zero_what_is_not_finite([gradient for _, gradient in ready])
    return correct(ready)


def _zero_what_is_not_finite(gradients: Any) -> None:
    for gradient in gradients:
        if not bool(torch.isfinite(gradient).all()):
            gradient.zero_()


def _kept_alive(correct: Any, member: Any) -> None:
    member.marker.__dict__.setdefault("kept", []).append(member.parameter.grad)
    correct(member)


def _removed_twice(correct: Any, self: Any, tensor: Any, nbytes: int) -> None:
    correct(self, tensor, nbytes)
    self.live -= nbytes


def _used_twice(correct: Any, self: Any, member: Any, gradient: Any) -> None:
    if gradient.ndim == 2:
        self._optimizer._update(member.parameter, gradient)
    correct(self, member, gradient)


def _clipped_on_arrival(correct: Any, self: Any, parameter: Any) -> None:
    clip_by_norm_([parameter.grad], [None], 1.0)
    correct(self, parameter)


def _l2_on_arrival(correct: Any, self: Any, parameter: Any) -> None:
    """Added to what is scaled, measured and clipped."""
    parameter.grad.add_(parameter.detach(), alpha=self._step.optimizer.group_of(parameter)["weight_decay"])
    correct(self, parameter)


_L2_BEFORE_THE_REST: Plant = both(
    instead(Arrival, "__call__", _l2_on_arrival),
    instead(Piece, "prepare", lambda correct, self, first, squares: correct(self, False, squares)),
)


def _transition(when: tuple[Policy, Status], wrong: Action) -> Any:
    def decide(correct: Any, policy: Policy, status: Status, event: Any, *, strict: bool = True) -> Decision:
        decision = correct(policy, status, event, strict=strict)
        if (policy, status) == when and isinstance(event, machine.Step) and decision.action.steps:
            return Decision(wrong, decision.status)
        return decision

    return decide


def _norm_of_another(correct: Any, self: Any) -> Any:
    self = self.like(self, self.device)
    self.key = next(key for key in self.context.squares if key != self.key)
    return correct(self)


def _norm_after_clipping(correct: Any, self: Any, member: Any, gradient: Any) -> None:
    correct(self, member, gradient)
    self._squares[member.key].clamp_(max=self._max_norm**2)


def _plant_additions_that_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(marker._HANDLERS, torch.ops.aten.add_.Tensor, lambda func, tensor, other, alpha=1: tensor)


FAULTS = [
    # the pipeline
    Fault("L2 added before clipping", _L2_BEFORE_THE_REST, "events/clip/adam/float32", "eager"),
    Fault("L2 added before unscaling", _L2_BEFORE_THE_REST, "events/overflow/adam/float32", "eager"),
    Fault(
        "step counted where it is skipped",
        both(*(instead(module, "count_skipped", _counts_skipped) for module in (stages, boundaries, guard))),
        "identity/skip/adamw/float32",
        "eager",
    ),
    Fault(
        "moments decayed by a gradient that is skipped",
        instead(stages, "finite", _finite_as_zeros),
        "events/nonfinite/adamw/float32",
        "eager",
    ),
    Fault(
        "moments decayed by a waiting gradient that is skipped",
        instead(boundaries, "each_finite", _each_finite_as_zeros),
        "events/nonfinite-hold/adamw/float32",
        "eager",
    ),
    Fault(
        "gradients that are not finite used", instead(Skip, "__call__", _left_out), "events/nonfinite/adamw/float32", "eager"
    ),
    Fault("tied weights released twice", instead(Update, "one", _used_twice), "events/tied/adamw/float32", "eager"),
    Fault(
        "max_norm applied to every micro-batch",
        instead(Arrival, "__call__", _clipped_on_arrival),
        "events/clip-hold/adamw/float32",
        "eager",
    ),
    Fault(
        "small gradients scaled up to max_norm",
        instead(guard, "clip_coefficient", lambda correct, norm, max_norm: max_norm / (norm + 1e-6)),
        "events/clip/adamw/float32",
        "eager",
    ),
    Fault(
        "gradient not clipped",
        instead(guard, "clip_coefficient", lambda correct, norm, max_norm: torch.ones_like(norm)),
        "events/clip/stable_adamw/float32",
        "eager",
    ),
    Fault(
        "gradient not clipped by its own norm",
        instead(stages, "multiply_", lambda correct, gradient, factor: None),
        "events/clip-each/stable_adamw/float32",
        "eager",
    ),
    Fault("gradient not unscaled", instead(Rescale, "__call__", _left_out), "events/overflow/adamw/float32", "eager"),
    # the boundaries
    Fault(
        "held gradient averaged instead of summed",
        instead(boundaries, "rescale_", lambda correct, gradient, factors: correct(gradient, [*factors, 0.25])),
        "events/hold/adam/float32",
        "eager",
    ),
    Fault(
        "held gradient not clipped by its own norm",
        instead(boundaries, "clip_by_norm_", lambda correct, gradients, shards, max_norm: []),
        "events/clip-each-hold/stable_adamw/float32",
        "eager",
    ),
    Fault(
        "held gradient discarded at step()",
        instead(step, "decide", _transition((Policy.HOLD, Status.HELD), Action.DISCARD)),
        "events/hold/adamw/float32",
        "eager",
    ),
    Fault(
        "no step at the end of micro-batches in the moments",
        instead(step, "decide", _transition((Policy.STATE, Status.ACCUMULATED), Action.NOTHING)),
        "events/state/adamw/float32",
        "eager",
    ),
    # memory and the ledger
    Fault("gradient not freed", instead(pipeline, "leave_marker", _kept_alive), "memory/release", "eager"),
    Fault(
        "gradient of a micro-batch not freed",
        instead(pipeline, "leave_marker", _kept_alive),
        "events/state/adamw/float32",
        "eager",
    ),
    Fault(
        "gradient kept by the backend",
        instead(Piece, "__exit__", lambda correct, self, *error: None),
        "memory/release",
        "eager",
    ),
    Fault("gradient freed twice", instead(Ledger, "arrive_and_free", _removed_twice), RELEASED_ADAMW, "eager"),
    Fault(
        "gradient not removed from the ledger",
        instead(Ledger, "arrive_and_free", lambda correct, self, tensor, nbytes: self.arrive(tensor, nbytes)),
        RELEASED_ADAMW,
        "eager",
    ),
    # the marker
    Fault(
        "marker tells the norm of another parameter",
        instead(ReleasedGradient, "norm_now", _norm_of_another),
        "marker/release/adamw/float32",
        "eager",
    ),
    Fault(
        "marker tells the norm of the clipped gradient",
        instead(ClipEach, "one", _norm_after_clipping),
        "marker/clip-each/adamw/float32",
        "eager",
    ),
    Fault(
        "marker passes any factor",
        instead(MarkerContext, "check_factor", lambda correct, self, marker, factor, operation: None),
        "marker/release/adamw/float32",
        "eager",
    ),
    Fault("marker lets another gradient in", _plant_additions_that_pass, "marker/release/adamw/float32", "eager"),
    Fault(
        "marker left by step()",
        instead(step.Step, "clear_markers", lambda correct, self: None),
        "marker/release/adamw/float32",
        "eager",
    ),
]
