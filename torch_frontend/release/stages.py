"""The stages of the pipeline: each is called with a list of gradients, works on them, and calls the next stage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.release import Action, GradientReady, Policy, Status
from ..clipping import clip_by_norm_, clip_coefficient, gradient_norm, multiply_, square_sum, square_sums
from ..finiteness import SkipCount, finite
from ..releasable import ReleasableOptimizer
from .marker_context import MarkerContext
from .member import Member
from .step import Step

ReadyGradient = tuple[Member, Tensor | None]
"""A parameter and its gradient: the local part of a sharded one, None in place of one that must not be used."""

Stage = Callable[[Sequence[ReadyGradient]], None]
Free = Callable[[Member], None]


class Skip:
    """Counts gradients that are not finite, and passes None on in their place.

    It synchronises, unless the backend skips them on the device.
    """

    def __init__(self, step: Step, skipped: SkipCount, next_stage: Any) -> None:
        self._step = step
        self._squares = step.context.squares
        self._skipped = skipped
        self.next_stage = next_stage

    def one(self, member: Member, gradient: Tensor) -> None:
        """Check and update one gradient; used where `Update` is next and only the host can skip."""
        norm = gradient_norm(gradient)
        if math.isfinite(norm):
            self._squares[member.key] = norm * norm
            self.next_stage.one(member, gradient, measure=False)
        else:  # its elements may be finite all the same
            self([(member, gradient)])

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Check several gradients, with one synchronisation."""
        gradients = {member: gradient for member, gradient in ready if gradient is not None}
        norms = [gradient_norm(gradient) for gradient in gradients.values()]
        if self._step.context.knows_norms:
            for member, norm in zip(gradients, norms, strict=True):
                self._squares[member.key] = norm * norm
        if not updates_on_device(self._step, [member for member, _ in ready]):
            shards = [member.shard for member in gradients]
            usable = dict(zip(gradients, finite(list(gradients.values()), shards, norms), strict=True))
            if not all(usable.values()):
                count_skipped(self._step.optimizer, self._skipped, list(usable.values()).count(False))
                ready = [(member, gradient if usable.get(member) else None) for member, gradient in ready]
        self.next_stage(ready)


def updates_on_device(step: Step, members: Sequence[Member]) -> bool:
    """Whether all of these are updated now by a backend that skips gradients on the device."""
    if not step.optimizer._checks_on_device(member.parameter for member in members):
        return False
    return all(action_for(step, member, True)[0] is Action.UPDATE for member in members)


def count_skipped(optimizer: ReleasableOptimizer, skipped: SkipCount, count: int = 1) -> None:
    """Add to the number of skipped gradients or steps of the release and of the optimizer."""
    skipped.add(count)
    optimizer._count_skipped(count)


class Norm:
    """Records the squared norm of each gradient, which its marker reports, before anything is clipped."""

    def __init__(self, context: MarkerContext, next_stage: Stage) -> None:
        self._squares = context.squares
        self.next_stage = next_stage

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        record_squares(self._squares, {member: gradient for member, gradient in ready if gradient is not None})
        self.next_stage(ready)


def record_squares(
    known: dict[int, Tensor], gradients: Mapping[Member, Tensor], squares: Sequence[Tensor] | None = None
) -> None:
    """Record the sum of each gradient's squares in `known`; None: they are to be computed."""
    found = square_sums(list(gradients.values())) if squares is None else squares
    known.update(zip([member.key for member in gradients], found, strict=True))


class ClipEach:
    """Clips each gradient by its own norm, and records the norm from before: clipping="per_tensor"."""

    def __init__(self, context: MarkerContext, max_norm: float, next_stage: Any) -> None:
        self._squares = context.squares
        self._copies = context.accepts_more
        self._max_norm = max_norm
        self.next_stage = next_stage

    def one(self, member: Member, gradient: Tensor) -> None:
        """Clip and hand on one gradient; used where `Update` or the queue of small gradients is next."""
        norm = gradient_norm(gradient)
        multiply_(gradient, clip_coefficient(norm, self._max_norm))
        self._squares[member.key] = norm * norm
        self.next_stage.one(member, gradient, measure=False)

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Clip in place. Autograd may share a gradient that was added to a marker, so that one is copied first."""
        if self._copies:
            ready = [(m, g if g is None or m.parameter.grad is g else g.clone()) for m, g in ready]
        usable = [(member, gradient) for member, gradient in ready if gradient is not None]
        norms = clip_by_norm_([gradient for _, gradient in usable], [member.shard for member, _ in usable], self._max_norm)
        for (member, _), norm in zip(usable, norms, strict=True):
            self._squares[member.key] = norm * norm
        self.next_stage(ready)


class Rescale:
    """Multiplies gradients, in place, by the factors that guard() has found: unscaling, then clipping."""

    def __init__(self, next_stage: Stage) -> None:
        self.factors: Sequence[Tensor | float] = ()
        self.next_stage = next_stage

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Apply each factor by itself, rounded to the gradient's dtype, as GradScaler and clip_grad_norm_ do."""
        for _, gradient in ready:
            rescale_(gradient, self.factors)
        self.next_stage(ready)


def rescale_(gradient: Tensor | None, factors: Sequence[Tensor | float]) -> None:
    """Multiply a gradient by each factor, in place."""
    if gradient is not None:
        for factor in factors:
            multiply_(gradient, factor)


class Update:
    """The last stage: the optimizer uses the gradients, and each is freed.

    Args:
        free: frees one gradient and leaves its marker in `.grad`.
    """

    def __init__(self, step: Step, skipped: SkipCount, free: Free) -> None:
        self._step = step
        self._optimizer = step.optimizer
        self._ledger = step.ledger
        self._squares = step.context.squares
        self._skipped = skipped
        self._free = free
        self._judges = step.optimizer._may_check_on_device

    def one(self, member: Member, gradient: Tensor, *, measure: bool = True) -> None:
        """Update one tensor that is not sharded: the common case.

        Args:
            measure: the norm of the gradient is not recorded yet.
        """
        square = self._optimizer._update(member.parameter, gradient, measure=measure)
        if measure:
            self._squares[member.key] = square_sum(gradient) if square is None else square
        self._ledger.arrive_and_free(member.key, member.nbytes)
        self._free(member)

    def together(self, gradients: Mapping[Member, Tensor]) -> None:
        """Update several tensors that are not sharded, whose norms are not recorded yet; frees nothing."""
        squares = self._optimizer._update_all([(m.parameter, g) for m, g in gradients.items()], measure=True)
        record_squares(self._squares, gradients, squares)

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Update several tensors; sums over shards are exchanged with other processes once for all of them."""
        with contextlib.nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
            released = self._step.released
            pairs = [(m.parameter, gradient) for m, gradient in ready if gradient is not None and m.key in released]
            if len(pairs) < len(ready) or self._judges:
                self._use(ready)
                return
            self._optimizer._update_all(pairs)
            del pairs
            for member, _ in ready:
                self._ledger.arrive_and_free(member.key, member.nbytes)
                self._free(member)

    def _use(self, ready: Sequence[ReadyGradient]) -> None:
        step = self._step
        decided = [(member, gradient, *action_for(step, member, gradient is not None)) for member, gradient in ready]
        self.perform([(m.parameter, g, action) for m, g, action, _ in decided if action is not Action.DISCARD])
        for member, _, _, status in decided:
            step.set_status(member.key, status)
            self._free(member)
            step.ledger.arrive_and_free(member.key, member.nbytes)

    def perform(self, tasks: Sequence[tuple[Tensor, Tensor | None, Action]]) -> None:
        """Let the optimizer perform (parameter, gradient, action) for each task."""
        if not tasks:
            return
        optimizer = self._optimizer
        actions = {action for _, _, action in tasks}
        self._step.settings.remember(optimizer.param_groups, stepped=any(action.steps for action in actions))
        checks = actions == {Action.UPDATE} and optimizer._checks_on_device(parameter for parameter, _, _ in tasks)
        applied = optimizer._perform_all(tasks, if_finite=checks)
        if applied:
            self._skipped.add_unapplied(applied)
        optimizer._opt_called = True


def action_for(step: Step, member: Member, finite: bool) -> tuple[Action, Status]:
    """What the state machine says of a gradient on its way to the optimizer; `released` has decided already."""
    if member.key in step.released:
        return (Action.UPDATE if finite else Action.DISCARD), Status.RELEASED
    decision = step.decide(member.parameter, GradientReady(step.last or step.policy is Policy.RELEASE, finite))
    return decision.action, decision.status
