"""The stages of the pipeline: each is called with the gradients that go on together, and knows the next stage only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import PenstockError
from ...core.release import Action, GradientReady, Policy, Status
from ..autograd.passes import pass_number
from ..clipping import clip_by_norm_, clip_coefficient, gradient_norm, multiply_, square_sum, square_sums
from ..communication.shards import local, placed_like
from ..finiteness import SkipCount, finite
from ..groups import PLAIN_GRADIENT, check_gradient
from ..releasable import ReleasableOptimizer
from .marker import Disclosure, ReleasedGradient
from .step import Member, Step

Arrived = tuple[Member, Tensor | None]
"""A parameter and its gradient, of a sharded one the part that is here; None instead of one that must not be used."""

Stage = Callable[[Sequence[Arrived]], None]
Use = Callable[[Member, Tensor], None]
Check = Callable[[Tensor], None]
Free = Callable[[Member], None]


class Arrival:
    """The first stage: called by the hook, in the backward pass, once the gradient is in `.grad`.

    Args:
        step: under way.
        use: what becomes of the gradient.
        check: raises `RefusedError` if the gradient may not be used; called before anything is changed.
        begin: called with the first gradient of a pass; None: `Step.begin_pass`.
    """

    def __init__(self, step: Step, use: Use, check: Check | None = None, begin: Check | None = None) -> None:
        self._step = step
        self._use = use
        self._check = check
        self._begin_pass = step.begin_pass if begin is None else begin

    def __call__(self, parameter: Tensor) -> None:
        """The local gradient of `parameter` has been accumulated into `.grad`."""
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self(parameter)
            return
        step = self._step
        with step.lock:
            try:
                if pass_number() != step.pass_id:
                    self._begin_pass(parameter)
                gradient, member = parameter.grad, step.members.get(id(parameter))
                if gradient is None or member is None:  # an earlier hook took it; or it was taken out of its group
                    return
                if type(gradient) is not Tensor or gradient.layout is not PLAIN_GRADIENT:
                    gradient = self._unusual(member, gradient)
                if self._check is not None:
                    self._check(parameter)
                self._take(member, gradient)
            except PenstockError:
                step.reject(parameter)
                raise

    def _unusual(self, member: Member, gradient: Tensor) -> Tensor:
        """A gradient that is not an ordinary tensor: a shard, a marker with what was added to it, or one to be refused."""
        here = local(gradient)
        if isinstance(here, ReleasedGradient):
            incoming, here.incoming = here.incoming, None
            if incoming is None:
                raise self._step.disclosure.second_gradient(here)
            if member.shard is None:
                gradient = here = incoming
            else:
                gradient = member.parameter.grad = placed_like(gradient, incoming)
                here = local(gradient)
        check_gradient(member.parameter, gradient)
        return here

    def _take(self, member: Member, gradient: Tensor) -> None:
        step = self._step
        if member.key in step.released:
            raise step.disclosure.second_gradient(member.marker)
        if step.to_come:
            step.check_whole(member.parameter, seen=False)
        step.released[member.key] = member
        try:
            self._use(member, gradient)
        except BaseException:
            step.released.pop(member.key, None)
            raise


class MeasuringArrival(Arrival):
    """... in the first pass of guard(), which changes nothing: `use` measures."""

    def _take(self, member: Member, gradient: Tensor) -> None:
        self._use(member, gradient)


class AccumulatingArrival(Arrival):
    """... of one of several micro-batches: it is kept in `.grad`, or goes on; `keep`: what becomes of one that is kept."""

    def __init__(self, *arguments: Any, keep: Use) -> None:
        super().__init__(*arguments)
        self._keep = keep

    def _take(self, member: Member, gradient: Tensor) -> None:
        step = self._step
        decision = step.decide(member.parameter, GradientReady(step.last))
        if decision.action is Action.KEEP:
            self._keep(member, gradient)
            step.set_status(member.key, decision.status)
        else:
            if step.to_come:
                step.check_whole(member.parameter, seen=False)
            self._use(member, gradient)


class Keeping(Arrival):
    """... inside `release.paused()`, or where the engine of communication only adds up: it stays in `.grad`."""

    def _take(self, member: Member, gradient: Tensor) -> None:
        decision = self._step.decide(member.parameter, GradientReady(last=False), paused=True)
        self._use(member, gradient)
        if decision.status is not Status.RELEASED:
            self._step.set_status(member.key, decision.status)


def one_by_one(stage: Stage) -> Use:
    """What an arrival calls, from a stage that takes several gradients."""
    return lambda member, gradient: stage([(member, gradient)])


class Skip:
    """Gradients that are not finite are counted instead of used. Synchronises, unless the device itself leaves them out."""

    def __init__(self, step: Step, skipped: SkipCount, following: Any) -> None:
        self._step = step
        self._squares = step.disclosure.squares
        self._skipped = skipped
        self.following = following

    def one(self, member: Member, gradient: Tensor) -> None:
        """The base case, as `Update.one`, which follows, where only the host can skip."""
        norm = gradient_norm(gradient)
        if math.isfinite(norm):
            self._squares[member.key] = norm * norm
            self.following.one(member, gradient, measure=False)
        else:  # its elements may be finite all the same
            self([(member, gradient)])

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """Go on with None instead of them."""
        gradients = {member: gradient for member, gradient in arrived if gradient is not None}
        norms = [gradient_norm(gradient) for gradient in gradients.values()]
        if self._step.disclosure.tells_norms:
            for member, norm in zip(gradients, norms, strict=True):
                self._squares[member.key] = norm * norm
        if not updates_on_device(self._step, [member for member, _ in arrived]):
            shards = [member.shard for member in gradients]
            usable = dict(zip(gradients, finite(list(gradients.values()), shards, norms), strict=True))
            if not all(usable.values()):
                count_skipped(self._step.optimizer, self._skipped, list(usable.values()).count(False))
                arrived = [(member, gradient if usable.get(member) else None) for member, gradient in arrived]
        self.following(arrived)


def updates_on_device(step: Step, members: Sequence[Member]) -> bool:
    """Whether all of these are updated now, and the device leaves out what is not finite."""
    if not step.optimizer.checks_on_device(member.parameter for member in members):
        return False
    return all(action_for(step, member, True)[0] is Action.UPDATE for member in members)


def count_skipped(optimizer: ReleasableOptimizer, skipped: SkipCount, count: int = 1) -> None:
    """Count gradients or steps that were not used, for the release and for the optimizer."""
    skipped.add(count)
    optimizer.count_skipped(count)


class Norm:
    """The norm of each gradient, for what its marker tells."""

    def __init__(self, disclosure: Disclosure, following: Stage) -> None:
        self._squares = disclosure.squares
        self.following = following

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """Before anything is clipped."""
        found = [(member, gradient) for member, gradient in arrived if gradient is not None]
        for (member, _), square in zip(found, square_sums([gradient for _, gradient in found]), strict=True):
            self._squares[member.key] = square
        del found
        self.following(arrived)


class ClipEach:
    """Each gradient is clipped by its own norm, which its marker tells: clipping="per_tensor"."""

    def __init__(self, disclosure: Disclosure, max_norm: float, following: Any) -> None:
        self._squares = disclosure.squares
        self._copies = disclosure.takes_more
        self._max_norm = max_norm
        self.following = following

    def one(self, member: Member, gradient: Tensor) -> None:
        """The base case, as `Update.one`, which follows."""
        norm = gradient_norm(gradient)
        multiply_(gradient, clip_coefficient(norm, self._max_norm))
        self._squares[member.key] = norm * norm
        self.following.one(member, gradient, measure=False)

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """In place; autograd may share what was added to a marker, so that is copied."""
        if self._copies:
            arrived = [(m, g if g is None or m.parameter.grad is g else g.clone()) for m, g in arrived]
        usable = [(member, gradient) for member, gradient in arrived if gradient is not None]
        norms = clip_by_norm_([gradient for _, gradient in usable], [member.shard for member, _ in usable], self._max_norm)
        for (member, _), norm in zip(usable, norms, strict=True):
            self._squares[member.key] = norm * norm
        self.following(arrived)


class Rescale:
    """Gradients are multiplied by what guard() has found: unscaled, then clipped. In place."""

    def __init__(self, following: Stage) -> None:
        self.factors: Sequence[Tensor | float] = ()
        self.following = following

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """Each factor is rounded to the gradient's dtype by itself, as GradScaler and clip_grad_norm_ have it."""
        for _, gradient in arrived:
            rescale_(gradient, self.factors)
        self.following(arrived)


def rescale_(gradient: Tensor | None, factors: Sequence[Tensor | float]) -> None:
    """Multiply a gradient by each factor, in place."""
    if gradient is not None:
        for factor in factors:
            multiply_(gradient, factor)


class Update:
    """The optimizer uses gradients, and each is freed: the last stage.

    Args:
        free: leaves the marker in `.grad`.
    """

    def __init__(self, step: Step, skipped: SkipCount, free: Free) -> None:
        self._step = step
        self._optimizer = step.optimizer
        self._ledger = step.ledger
        self._squares = step.disclosure.squares
        self._skipped = skipped
        self._free = free
        self._judges = step.optimizer.may_check_on_device

    def one(self, member: Member, gradient: Tensor, *, measure: bool = True) -> None:
        """The base case: one gradient, the whole of it, of a tensor that is not sharded. measure: its norm is not known yet."""
        square = self._optimizer.update(member.parameter, gradient, measure=measure)
        if measure:
            self._squares[member.key] = square_sum(gradient) if square is None else square
        self._ledger.arrive_and_free(member.key, member.nbytes)
        self._free(member)

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """Several gradients; what they need from other processes comes in one exchange."""
        with contextlib.nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
            released = self._step.released
            ready = [(m.parameter, gradient) for m, gradient in arrived if gradient is not None and m.key in released]
            if len(ready) < len(arrived) or self._judges:
                self._use(arrived)
                return
            self._optimizer.update_all(ready)
            del ready
            for member, _ in arrived:
                self._ledger.arrive_and_free(member.key, member.nbytes)
                self._free(member)

    def _use(self, arrived: Sequence[Arrived]) -> None:
        step = self._step
        decided = [(member, gradient, *action_for(step, member, gradient is not None)) for member, gradient in arrived]
        self.perform([(m.parameter, g, action) for m, g, action, _ in decided if action is not Action.DISCARD])
        for member, _, _, status in decided:
            step.set_status(member.key, status)
            self._free(member)
            step.ledger.arrive_and_free(member.key, member.nbytes)

    def perform(self, tasks: Sequence[tuple[Tensor, Tensor | None, Action]]) -> None:
        """The optimizer's part: parameter, gradient, action."""
        if not tasks:
            return
        optimizer = self._optimizer
        actions = {action for _, _, action in tasks}
        self._step.settings.remember(optimizer.param_groups, stepped=any(action.steps for action in actions))
        checks = actions == {Action.UPDATE} and optimizer.checks_on_device(parameter for parameter, _, _ in tasks)
        applied = optimizer.perform_all(tasks, if_finite=checks)
        if applied:
            self._skipped.add_unapplied(applied)
        optimizer._opt_called = True


def action_for(step: Step, member: Member, finite: bool) -> tuple[Action, Status]:
    """What the state machine says of a gradient that goes on to the optimizer; one that is released is on its way there."""
    if member.key in step.released:
        return (Action.UPDATE if finite else Action.DISCARD), Status.RELEASED
    decision = step.decide(member.parameter, GradientReady(step.last or step.policy is Policy.RELEASE, finite))
    return decision.action, decision.status


def leave_marker(member: Member) -> None:
    """Free the gradient: `.grad` says that it was used."""
    member.parameter.grad = member.placed
