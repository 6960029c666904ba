"""The step that is under way: which parameters are released, where each is, and the bytes of gradient alive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.errors import RefusedError
from ...core.release import Decision, Event, Ledger, Policy, Status, decide
from ..autograd.passes import is_nested, pass_number
from ..autograd.reentrant import still_to_come
from ..communication.protocol import Purpose
from ..communication.shards import is_released, local, placed_like, shard_of
from ..groups import UsedSettings
from ..releasable import ReleasableOptimizer
from .marker import Disclosure, ReleasedGradient


class Member:
    """A released parameter, and what its gradient leaves in `.grad`.

    shard: the part of a sharded parameter that is stored here. nbytes: of its gradient, of a sharded one the local part.
    marker: what refuses and answers. placed: what is put into `.grad`: the marker, of a sharded parameter a DTensor around it;
    None where another hook must find the next gradient there.
    """

    __slots__ = ("key", "marker", "nbytes", "parameter", "placed", "shard")

    def __init__(self, parameter: Tensor, disclosure: Disclosure) -> None:
        self.key = id(parameter)
        self.parameter = parameter
        self.placed: Tensor | None = None
        self.renew(disclosure)

    def renew(self, disclosure: Disclosure) -> None:
        """Make the marker anew, for what the parameter is now."""
        here, self.shard = local(self.parameter), shard_of(self.parameter)
        self.nbytes = here.numel() * here.element_size()
        self.marker = ReleasedGradient(here, disclosure, self.key)
        self.placed = self.marker
        if disclosure.takes_more and len(getattr(self.parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
            self.placed = None
        elif self.shard is not None:
            with torch.no_grad():
                self.placed = placed_like(self.parameter.data, self.marker)
                self.marker = local(self.placed)

    def fits(self) -> bool:
        """Whether the marker is of the parameter's dtype, shape and device still."""
        placed, parameter = self.placed, self.parameter
        if placed is None:
            return True
        return placed.dtype is parameter.dtype and placed.shape == parameter.shape and placed.device == parameter.device


class Step:
    """What has happened since the last step() or zero_grad().

    Attributes:
        members: every released parameter, by its id.
        released: those that were updated in this step, or are about to be; empty where every backward is an update.
        mixed: what waits in their `.grad` has something of a refused backward in it.
        last: no other micro-batch follows the pass that is running.
        watched: the pass that updates parameters and whose end is waited for, if there is one.

    Args:
        one_pass: a step has one backward, and every gradient is used in it.
        strict: one update a step; see `core.release.decide`.
    """

    def __init__(
        self, optimizer: ReleasableOptimizer, disclosure: Disclosure, policy: Policy, *, strict: bool, one_pass: bool
    ) -> None:
        self.optimizer = optimizer
        self.disclosure = disclosure
        self.policy = policy
        self.strict = strict
        self.ledger = Ledger()
        self.lock = threading.RLock()  # autograd runs the hooks of several devices in several threads
        self.members: dict[int, Member] = {}
        self.released: dict[int, Member] = {}
        self.mixed: set[int] = set()
        self.last = True
        self.watched: int | None = None
        self.pass_id: Any = self  # of the pass that is running; this object is none
        self.to_come: set[Tensor] = set()  # of the gradients that come in the running pass, those that come again
        self._status: dict[int, Status] = {}  # of those that are not idle nor released
        self.settings = UsedSettings(optimizer.rule)
        self._one_pass = one_pass
        self._top: int | None = None  # the pass, started by the user, that updated parameters in this step

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Release these parameters, those and no others."""
        before = self.members
        self.members = {id(p): before.get(id(p)) or Member(p, self.disclosure) for p in parameters}

    def refresh(self) -> None:
        """Read the optimizer's groups again, and fit the markers to what parameters are now.

        Raises:
            InvalidArgumentError: a setting is out of range; nothing was changed.
        """
        changed = self.optimizer.refresh()
        if changed:  # those that were taken out of their group are left alone
            self.members = {key: member for key, member in self.members.items() if self.optimizer.holds(member.parameter)}
        for member in self.members.values():
            if not member.fits():
                member.renew(self.disclosure)
            elif changed:
                member.nbytes = local(member.parameter).nbytes

    def begin_pass(self, parameter: Tensor, *, measures: bool = False) -> None:
        """The first gradient of a backward pass has come, or of one inside it, or the outer one goes on.

        Raises:
            RefusedError: a second backward, before any parameter is changed by it.
        """
        now = pass_number()
        nested = is_nested()
        if not nested and self._one_pass and not measures and None not in (self._top, now) and now != self._top:
            raise RefusedError(
                f"{self.disclosure.describe(id(parameter))}: a second backward() before optimizer.step(), after the first "
                "has updated parameters. Call optimizer.step() after each backward; or add the losses up and call "
                "backward() once; or declare the micro-batches with accumulation='hold' or 'state'."
            )
        if not nested or self.pass_id is self:
            self.refresh()
            if self.pass_id is self and not self._status:  # the first pass of a step
                self.disclosure.squares.clear()
                self.disclosure.judged = False
            if self.policy is Policy.RELEASE and not measures:
                self.settings.remember(self.optimizer.param_groups, stepped=True)
                self.optimizer._opt_called = True
        self.to_come = still_to_come() if nested else set()
        self.pass_id = now
        if not nested and not measures:
            self._top = now

    def check_whole(self, parameter: Tensor, *, seen: bool) -> None:
        """Raise `RefusedError` if what came is a part of a gradient, and would be used as if it were the whole."""
        if seen or parameter in self.to_come:
            raise RefusedError(
                f"{self.disclosure.describe(id(parameter))}: its gradient comes in several parts in one backward (reentrant "
                "checkpointing of a layer that is used several times), and each would be used as if it were the whole. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or accumulation='hold'."
            )

    def purpose(self, *, measured: bool) -> Purpose:
        """What the gradients that come now are for."""
        begun = Status.ACCUMULATED in self._status.values()
        return Purpose(measured=measured, last=measured or self.policy is Policy.RELEASE or self.last, first=not begun)

    def status(self, key: int) -> Status:
        """Where the parameter of this id is."""
        return Status.RELEASED if key in self.released else self._status.get(key, Status.IDLE)

    def with_status(self, status: Status) -> list[Member]:
        """The parameters that are there."""
        return [self.members[key] for key, found in self._status.items() if found is status and key in self.members]

    def without_gradient(self) -> list[Tensor]:
        """The parameters of which no gradient has come in this step."""
        return [m.parameter for key, m in self.members.items() if key not in self.released and key not in self._status]

    def decide(self, parameter: Tensor, event: Event, *, paused: bool = False) -> Decision:
        """What is to be done; changes nothing.

        Raises:
            RefusedError: nothing exact can be done; the text names the parameter.
        """
        try:
            policy = Policy.PAUSE if paused else self.policy
            return decide(policy, self.status(id(parameter)), event, strict=self.strict)
        except RefusedError as refusal:
            raise RefusedError(f"{self.disclosure.describe(id(parameter))}: {refusal}") from None

    def set_status(self, key: int, status: Status) -> None:
        """The parameter of this id is there now."""
        if status is Status.RELEASED and key in self.members:
            self._status.pop(key, None)
            self.released[key] = self.members[key]
        elif status is Status.IDLE:
            self._status.pop(key, None)
        else:
            self._status[key] = status

    @property
    def has_waiting(self) -> bool:
        """Whether a gradient waits, or micro-batches in the moments do."""
        return bool(self._status)

    def open(self) -> Iterator[tuple[int, Status]]:
        """The ids of the parameters that this step has touched, and where they are."""
        yield from self._status.items()
        yield from dict.fromkeys(self.released, Status.RELEASED).items()

    def held(self, parameter: Tensor) -> bool:
        """Whether its gradient is alive and waits."""
        return self._status.get(id(parameter)) is Status.HELD

    def check_settings(self) -> None:
        """Raise `RefusedError` if a setting changed after its use in this step."""
        if self.released or Status.ACCUMULATED in self._status.values():
            self.settings.check(self.optimizer.param_groups)

    def free(self, parameter: Tensor) -> None:
        """Free its gradient unused."""
        parameter.grad = None
        self.ledger.free(id(parameter))

    def reject(self, parameter: Tensor) -> None:
        """Its gradient is refused: nothing of it stays. (It may be in the sum of what is held, where nobody could tell before
        it was added; then step() is refused.)"""
        if self.held(parameter):
            self.mixed.add(id(parameter))
        elif not is_released(parameter.grad):
            self.free(parameter)
        self.disclosure.after_refusal()

    def remove_from_ledger(self) -> None:
        """No gradient is under way: what is in the ledger and does not wait will not come (of a backward that failed, or of a
        block of micro-batches, whose gradients are recorded together)."""
        for key in self.ledger.booked:
            assert isinstance(key, int)
            if self._status.get(key) not in (Status.HELD, Status.QUEUED):
                self.ledger.free(key)

    def clear_markers(self) -> None:
        """Leave `.grad` of released parameters as if there had never been a gradient."""
        for member in self.members.values():
            if member.parameter.grad is member.placed:
                member.parameter.grad = None

    @torch.no_grad()
    def close(self) -> None:
        """The step is over. Leniently, micro-batches in the moments stay for the update that ends them."""
        self.clear_markers()
        self.released.clear()
        self.mixed.clear()
        self.remove_from_ledger()
        left = [key for key, status in self._status.items() if status is Status.ACCUMULATED and not self.strict]
        self._status = dict.fromkeys(left, Status.ACCUMULATED)
        self.settings, self._top, self.pass_id = UsedSettings(self.optimizer.rule), None, self
        self.to_come = set()

    def abandon(self) -> None:
        """The step was cut short and is not completed."""
        for member in self.with_status(Status.ACCUMULATED):
            self.optimizer.state[member.parameter].pop("mean_square", None)
        self._status.clear()
