"""The state machine of release and accumulation: what to do with a tensor's gradient at every event. It has no side effects.

Each tensor has a `Status` within the group of micro-batches that make one update. For an `Event`, `decide` returns what to do
(`Action`) and the new status. The PyTorch frontend does it and records it in the `Ledger`. (In JAX the order of events is
fixed when a step is traced, so that there is nothing to decide.)

=========  ==============================================  ============  =======================
policy     a micro-batch that is not the last              the last one  exact?
=========  ==============================================  ============  =======================
RELEASE    (there is none: a second one is refused)        update, free  yes
HOLD       keep the gradient, the next one adds to it      update, free  yes
STATE      into the moments, free                          update, free  no: AdamA
PAUSE      keep the gradient, as without release           the same      yes
=========  ==============================================  ============  =======================

"Update, free" may be delayed: small gradients may be queued, in the ledger, so that one launch updates several tensors
(`Status.QUEUED`). The queue is used before anything else happens to these tensors, so that the numbers are the same.
"""

from __future__ import annotations

import dataclasses
import enum

from ..errors import RefusedError

AFTER_ANOTHER_BACKWARD = (
    "Call optimizer.step() after each backward; or add the losses up and call backward() once; or divide the batch with "
    "microbatch_blocks; or declare the micro-batches with accumulation='hold' or 'state'"
)
"""What to do about a second backward in a step that has one."""


class Policy(enum.Enum):
    """What is done with a gradient the moment it exists."""

    RELEASE = "release"
    HOLD = "hold"
    STATE = "state"
    PAUSE = "pause"


class Status(enum.Enum):
    """What has happened to a tensor in the group of micro-batches that make its next update."""

    IDLE = "idle"  # it has had no gradient of this group
    HELD = "held"  # its gradient is kept in `.grad`
    QUEUED = "queued"  # its whole gradient is in the queue of small updates
    ACCUMULATED = "accumulated"  # micro-batches of this group are in the moments, and the parameter has not changed
    RELEASED = "released"  # updated in this group


class Action(enum.Enum):
    """What the frontend does with a gradient or a tensor."""

    NOTHING = "nothing"
    KEEP = "keep"  # leave the gradient where it is
    ACCUMULATE_FIRST = "accumulate_first"  # into decayed moments, then free it
    ACCUMULATE = "accumulate"  # into the moments, then free it
    UPDATE = "update"  # into decayed moments, step, then free it
    UPDATE_LAST = "update_last"  # into the moments, step, then free it
    APPLY = "apply"  # step from the moments; there is no gradient
    DISCARD = "discard"  # free the gradient unused

    frees: bool  # no gradient is left afterwards
    steps: bool  # the parameter changes
    first: bool  # the moments are decayed: the gradient is the first of its update


for _action in Action:
    _action.frees = _action not in (Action.NOTHING, Action.KEEP)
    _action.steps = _action in (Action.UPDATE, Action.UPDATE_LAST, Action.APPLY)
    _action.first = _action in (Action.ACCUMULATE_FIRST, Action.UPDATE)


@dataclasses.dataclass(frozen=True)
class GradientReady:
    """The gradient of a tensor exists.

    Attributes:
        last: it is of the last micro-batch of its group.
        finite: False if it must be skipped because it contains an infinity or a NaN.
    """

    last: bool = True
    finite: bool = True


@dataclasses.dataclass(frozen=True)
class Step:
    """optimizer.step() is called: pending gradients are used, and the group ends.

    Attributes:
        finite: as in `GradientReady`.
        waiting: a gradient is in `.grad`.
    """

    finite: bool = True
    waiting: bool = False


@dataclasses.dataclass(frozen=True)
class ZeroGrad:
    """optimizer.zero_grad() is called: held and queued gradients are discarded, and the group ends."""


Event = GradientReady | Step | ZeroGrad


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do, and the status of the tensor afterwards."""

    action: Action
    status: Status


def decide(policy: Policy, status: Status, event: Event, *, strict: bool = True) -> Decision:
    """Return the transition of one tensor.

    Args:
        policy: what the user asked for.
        status: of this tensor.
        event: what happened.
        strict: a group has one update and is ended by step() or zero_grad(). Otherwise every last micro-batch is an update,
            and step() and zero_grad() end nothing.

    Raises:
        RefusedError: an exact result is impossible; nothing was changed.
        ValueError: an event other than `ZeroGrad` for a queued tensor, which the frontend must use first.
    """
    if isinstance(event, ZeroGrad):
        return _zero_grad(status, strict)
    if isinstance(event, GradientReady) and policy is Policy.PAUSE:
        return Decision(Action.KEEP, Status.HELD if status is Status.IDLE else status)
    if status is Status.QUEUED:
        raise ValueError(f"{event} of a tensor that is queued: its gradient must be used first")
    if isinstance(event, GradientReady):
        return _gradient_ready(policy, status, event, strict)
    return _step(status, event, strict)


def _gradient_ready(policy: Policy, status: Status, event: GradientReady, strict: bool) -> Decision:
    if status is Status.RELEASED and strict:
        raise RefusedError(
            "it was already updated in this step, and another gradient arrived before optimizer.step(). "
            f"{AFTER_ANOTHER_BACKWARD}; or wrap a backward that is not meant to update it in release.paused()."
        )
    last = event.last or policy is Policy.RELEASE
    if policy is Policy.HOLD and not last:
        return Decision(Action.KEEP, Status.HELD)
    updated = Status.RELEASED if strict else Status.IDLE
    if status is Status.ACCUMULATED:
        used = Action.UPDATE_LAST if last else Action.ACCUMULATE
        unused = Action.APPLY if last else Action.DISCARD
    else:
        used = Action.UPDATE if last else Action.ACCUMULATE_FIRST
        unused = Action.DISCARD
    if event.finite:
        return Decision(used, updated if last else Status.ACCUMULATED)
    return Decision(unused, updated if last else Status.ACCUMULATED if status is Status.ACCUMULATED else Status.IDLE)


def _step(status: Status, event: Step, strict: bool) -> Decision:
    if status is Status.HELD:
        return Decision(Action.UPDATE if event.finite else Action.DISCARD, Status.IDLE)
    if status is Status.ACCUMULATED:
        if event.waiting and event.finite:
            return Decision(Action.UPDATE_LAST, Status.IDLE)
        return Decision(Action.APPLY, Status.IDLE) if strict else Decision(Action.NOTHING, status)
    if status is Status.RELEASED and event.waiting:
        raise RefusedError(
            "a gradient is in `.grad`, set by hand, left by release.paused(), or put there by a DistributedDataParallel that "
            "release_gradients was not given, after it was already updated in this step. "
            "Call optimizer.step() before such a gradient comes; optimizer.zero_grad() discards it."
        )
    return Decision(Action.NOTHING, Status.IDLE)


def _zero_grad(status: Status, strict: bool) -> Decision:
    if status in (Status.HELD, Status.QUEUED):
        return Decision(Action.DISCARD, Status.IDLE)
    if status is Status.ACCUMULATED:
        if strict:
            raise RefusedError(
                "micro-batches of it are in the optimizer's moments and cannot be discarded. Call optimizer.step() before "
                "optimizer.zero_grad()."
            )
        return Decision(Action.NOTHING, status)
    return Decision(Action.NOTHING, Status.IDLE)
