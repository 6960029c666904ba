"""The current step: which parameters are released, the status of each, and the bytes of gradient alive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.errors import RefusedError
from ...core.release import AFTER_ANOTHER_BACKWARD, Decision, Event, Ledger, Policy, Status, decide
from ..autograd.passes import at_end_of_pass, is_nested, pass_number, weakly
from ..autograd.reentrant import PartialGradients
from ..communication.protocol import RoundKind
from ..communication.shards import is_released, local
from ..releasable import ReleasableOptimizer
from .marker_context import MarkerContext
from .member import Member
from .used_settings import UsedSettings
from .user_changes import UserChanges

NO_PASS = object()
"""Stands for the number of a pass where there is none; not None, which is every pass's number where torch tells no numbers."""


class Step:
    """What has happened since the last step() or zero_grad().

    Attributes:
        members: every released parameter, by its id.
        released: those that were updated in this step, or are about to be; empty where every backward is an update.
        contaminated: ids of parameters whose gradient in `.grad` may include a part of a refused backward.
        joined: ids of parameters with micro-batches in the moments and a gradient of release.paused() in `.grad`.
        last: the running pass is the last micro-batch.
        pass_id: number of the running pass; `NO_PASS` before the first.
        in_parts: parameters of which this backward delivers several gradients, each a part.
        completed: the backward that released gradients in this step has reached its end.

    Args:
        strict: a step has one update; see `core.release.decide`.
    """

    def __init__(self, optimizer: ReleasableOptimizer, context: MarkerContext, policy: Policy, *, strict: bool) -> None:
        self.optimizer = optimizer
        self.context = context
        self.policy = policy
        self.strict = strict
        self.ledger = Ledger()
        self.lock = threading.RLock()  # autograd runs the hooks of several devices in several threads
        self.members: dict[int, Member] = {}
        self.released: dict[int, Member] = {}
        self.contaminated: set[int] = set()
        self.joined: set[int] = set()
        self.last = True
        self.pass_id: Any = NO_PASS
        self.in_parts: set[Tensor] = set()
        self.completed = False
        self._user_changes = UserChanges(context)
        self._status: dict[int, Status] = {}  # of parameters that are neither idle nor released
        self.settings = UsedSettings()
        self._partial = PartialGradients()
        self._one_update = strict and policy is not Policy.STATE  # of every gradient, in one backward
        self._top: int | None = None  # number of the user's backward that updated parameters in this step
        self._latest = -1  # the largest number of a pass so far
        self._ended = False  # the outermost pass of a backward that has updated parameters in this step

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Make these the released parameters."""
        before = self.members
        self.members = {id(p): before.get(id(p)) or Member(p, self.context) for p in parameters}

    def refresh(self) -> None:
        """Read the optimizer's groups again, and rebuild the markers of parameters that were converted.

        Raises:
            InvalidArgumentError: a setting is out of range; nothing was changed.
        """
        changed = self.optimizer._refresh()
        if changed:  # parameters that were taken out of their group are left alone
            self.members = {key: member for key, member in self.members.items() if self.optimizer._holds(member.parameter)}
        for member in self.members.values():
            if not member.is_current():
                member.rebuild_marker(self.context)
            elif changed:
                member.nbytes = local(member.parameter).nbytes

    def begin_pass(self, parameter: Tensor, *, measures: bool = False, measured: bool = False) -> None:
        """Prepare for the gradients of a backward pass, a nested one, or the rest of the outer one.

        Args:
            parameter: the first that has a gradient.
            measures: this is the first pass of guard().
            measured: this is the second pass of guard().

        Raises:
            RefusedError: this is a second backward; no parameter was changed by it.
        """
        now = pass_number()
        nested = is_nested()
        if not nested and not measures and None not in (self._top, now) and now != self._top:
            raise self._second_backward(parameter)
        if not nested or self.pass_id is NO_PASS or now != self._latest + 1:  # another pass has run since the last nested one
            if self.strict and self.policy is Policy.STATE:
                self._check_not_cleared()
            self.refresh()
            if self.pass_id is NO_PASS and not self._status:  # the first pass of a step
                self.context.squares.clear()
                self.context.judged = False
            if self.policy is Policy.RELEASE and not measures:
                self.settings.remember(self.optimizer.param_groups, stepped=True)
                self.optimizer._opt_called = True
        keeps = measures or measured or (self.policy is Policy.HOLD and not self.last)  # and so no part is used as the whole
        self.in_parts = set() if keeps else self._partial.find(nested=nested)
        another = self._partial.in_another or (nested and self._ended)
        if not keeps and self._one_update and self.released and another:
            raise self._second_backward(parameter)
        self.pass_id = now
        self._latest = max(self._latest, now or 0)
        if measures:
            return
        if not nested and self._one_update and self.last:
            self._top = now
        self.completed = False
        if self.strict and (not nested or self._partial.all_begun):  # the end of the outer pass cannot be seen from inside
            at_end_of_pass(weakly(self.complete if nested else self._end))

    def check_not_ahead(self, parameter: Tensor) -> None:
        """Raise `RefusedError` if this is a gradient of a backward after the one that has updated parameters in this step."""
        if self.strict and self.released and (pass_number() or 0) > self._latest and (self._ended or not is_nested()):
            self.context.refused = True
            self.context.after_refusal()
            raise self._second_backward(parameter)

    def _second_backward(self, parameter: Tensor) -> RefusedError:
        return RefusedError(
            f"{self.context.describe(id(parameter))}: a second backward() before optimizer.step(), after the first "
            f"has updated parameters. {AFTER_ANOTHER_BACKWARD}."
        )

    def _end(self) -> None:
        self._ended = bool(self.released)
        self.complete()

    def complete(self) -> None:
        """Record that the backward has reached its end, and which version of each parameter it has left."""
        self.completed = True
        self._user_changes.record(self.released.values())

    def check_untouched(self) -> None:
        """Raise `RefusedError` if user code has cleared gradients that were used already, or written their parameters."""
        if self.policy is Policy.STATE:
            self._check_not_cleared()
        else:
            self._user_changes.check(self.released.values())

    def _check_not_cleared(self) -> None:
        self._user_changes.check_moments((*self.with_status(Status.ACCUMULATED), *self.released.values()), self.joined)

    def check_not_partial(self, parameter: Tensor, *, seen: bool) -> None:
        """Raise `RefusedError` if only a part of the parameter's gradient has come, which would be used as the whole."""
        if seen or parameter in self.in_parts:
            raise RefusedError(
                f"{self.context.describe(id(parameter))}: its gradient comes in several parts in one backward (reentrant "
                "checkpointing of a layer that is used several times), and each would be used as if it were the whole. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or accumulation='hold'."
            )

    def round_kind(self, *, measured: bool) -> RoundKind:
        """The kind of communication round that the running pass belongs to."""
        begun = Status.ACCUMULATED in self._status.values()
        return RoundKind(measured=measured, last=measured or self.policy is Policy.RELEASE or self.last, first=not begun)

    def status(self, key: int) -> Status:
        """The status of the parameter with this id."""
        return Status.RELEASED if key in self.released else self._status.get(key, Status.IDLE)

    def with_status(self, status: Status) -> list[Member]:
        """The parameters with this status."""
        return [self.members[key] for key, found in self._status.items() if found is status and key in self.members]

    def without_gradient(self) -> list[Tensor]:
        """The parameters that have had no gradient in this step."""
        return [m.parameter for key, m in self.members.items() if key not in self.released and key not in self._status]

    def decide(self, parameter: Tensor, event: Event, *, paused: bool = False) -> Decision:
        """Ask the state machine what to do with the parameter; changes nothing.

        Raises:
            RefusedError: an exact result is impossible; the text names the parameter.
        """
        try:
            policy = Policy.PAUSE if paused else self.policy
            return decide(policy, self.status(id(parameter)), event, strict=self.strict)
        except RefusedError as refusal:
            raise RefusedError(f"{self.context.describe(id(parameter))}: {refusal}") from None

    def set_status(self, key: int, status: Status) -> None:
        """Record the status of the parameter with this id."""
        if status is Status.RELEASED and key in self.members:
            self._status.pop(key, None)
            self.released[key] = self.members[key]
        elif status is Status.IDLE:
            self._status.pop(key, None)
        else:
            self._status[key] = status

    @property
    def has_pending(self) -> bool:
        """Whether a held gradient, or micro-batches in the moments, are still to be used."""
        return bool(self._status)

    def touched(self) -> Iterator[tuple[int, Status]]:
        """Yield id and status of every parameter that is not idle."""
        yield from self._status.items()
        yield from dict.fromkeys(self.released, Status.RELEASED).items()

    def is_held(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is held in `.grad`."""
        return self._status.get(id(parameter)) is Status.HELD

    def is_queued(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is in the queue of small updates."""
        return self._status.get(id(parameter)) is Status.QUEUED

    def check_settings(self) -> None:
        """Raise `RefusedError` if a setting changed after its use in this step."""
        if self.released or Status.ACCUMULATED in self._status.values():
            self.settings.check(self.optimizer.param_groups)

    def free(self, parameter: Tensor) -> None:
        """Free the parameter's gradient without using it."""
        parameter.grad = None
        self.ledger.free(id(parameter))

    def reject(self, parameter: Tensor) -> None:
        """Free the refused gradient of a parameter.

        Where autograd has added it to a held gradient already, that one is marked as contaminated, and step() raises.
        """
        if self.is_held(parameter):
            self.contaminated.add(id(parameter))
        elif not is_released(parameter.grad):
            self.free(parameter)
        self.context.refused = True
        self.context.after_refusal()

    def remove_from_ledger(self) -> None:
        """Remove gradients that no longer exist: of a backward that failed, and of a block of micro-batches, whose gradients
        are recorded together."""
        for key in self.ledger.recorded:
            assert isinstance(key, int)
            if self._status.get(key) not in (Status.HELD, Status.QUEUED):
                self.ledger.free(key)

    def clear_markers(self) -> None:
        """Set `.grad` to None where it holds a marker."""
        for member in self.members.values():
            if member.parameter.grad is member.placeholder:
                member.parameter.grad = None

    def restore_markers(self) -> None:
        """Put the markers of this step back where no gradient was left instead."""
        for member in (*self.released.values(), *self.with_status(Status.ACCUMULATED)):
            if member.parameter.grad is None:
                member.leave_marker()
            elif not is_released(member.parameter.grad):
                self.joined.add(member.key)

    @torch.no_grad()
    def close(self) -> None:
        """End the step. A lenient release keeps micro-batches in the moments for the update that completes them."""
        self.clear_markers()
        self.released.clear()
        self.contaminated.clear()
        self.joined.clear()
        self.remove_from_ledger()
        kept = [key for key, status in self._status.items() if status is Status.ACCUMULATED and not self.strict]
        self._status = dict.fromkeys(kept, Status.ACCUMULATED)
        self.settings, self._top, self.pass_id = UsedSettings(), None, NO_PASS
        self.in_parts = set()
        self._partial.forget()
        self._user_changes.forget()
        self.completed = self._ended = False

    def abandon(self) -> None:
        """Forget a step that an exception has cut short."""
        for member in self.with_status(Status.ACCUMULATED):
            for key in ("mean_square", "microbatches"):
                self.optimizer.state[member.parameter].pop(key, None)
        self._status.clear()
        self.released.clear()
