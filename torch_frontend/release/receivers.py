"""The receivers of gradients: called by the hook, they check a gradient in `.grad`, and hand it on, or leave it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.errors import PenstockError
from ...core.release import Action, GradientReady, Status
from ..autograd.passes import pass_number
from ..checks import PLAIN_GRADIENT, check_gradient
from ..communication.shards import distribute_like, local
from .marker import ReleasedGradient
from .member import Member
from .stages import Stage
from .step import Step

Use = Callable[[Member, Tensor], None]
Check = Callable[[Tensor], None]


class GradientReceiver:
    """The first stage, called by the hook inside the backward pass: checks the gradient in `.grad`, and hands it on.

    Args:
        step: the current step.
        use: the next stage.
        check: raises `RefusedError` if the gradient may not be used. It is called before anything is changed.
        begin: called with the first gradient of a pass; None means `Step.begin_pass`.
    """

    def __init__(self, step: Step, use: Use, check: Check | None = None, begin: Check | None = None) -> None:
        self._step = step
        self._use = use
        self._check = check
        self._begin_pass = step.begin_pass if begin is None else begin

    def __call__(self, parameter: Tensor) -> None:
        """Receive the gradient that autograd has accumulated into `parameter.grad`."""
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
                if gradient is None or member is None:  # an earlier hook took the gradient, or the user the parameter
                    return
                if not parameter.requires_grad:  # frozen since the forward: what is in `.grad` was there before
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
        """Return the tensor to use for a shard, or for a marker that a gradient was added to; raise for anything else."""
        here = local(gradient)
        if isinstance(here, ReleasedGradient):
            incoming, here.incoming = here.incoming, None
            if incoming is None:
                raise self._step.context.second_gradient(here)
            if member.shard is None:
                gradient = here = incoming
            else:
                gradient = member.parameter.grad = distribute_like(gradient, incoming)
                here = local(gradient)
        check_gradient(member.parameter, gradient)
        return here

    def _take(self, member: Member, gradient: Tensor) -> None:
        step = self._step
        if member.key in step.released:
            raise step.context.second_gradient(member.marker)
        if step.in_parts:
            step.check_not_partial(member.parameter, seen=False)
        step.released[member.key] = member
        try:
            self._use(member, gradient)
        except BaseException:
            step.released.pop(member.key, None)
            raise


class MeasuringReceiver(GradientReceiver):
    """Receives gradients in the first pass of guard(), where `use` only measures them."""

    def _take(self, member: Member, gradient: Tensor) -> None:
        self._use(member, gradient)


class AccumulatingReceiver(GradientReceiver):
    """Receives gradients of micro-batches: each stays in `.grad` and is given to `keep`, or goes on to `use`."""

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
            if step.in_parts:
                step.check_not_partial(member.parameter, seen=False)
            self._use(member, gradient)


class KeepingReceiver(GradientReceiver):
    """Receives gradients that stay in `.grad`: inside `release.paused()`, and inside no_sync()."""

    def _take(self, member: Member, gradient: Tensor) -> None:
        decision = self._step.decide(member.parameter, GradientReady(last=False), paused=True)
        self._use(member, gradient)
        if decision.status is not Status.RELEASED:
            self._step.set_status(member.key, decision.status)


def for_each(stage: Stage) -> Use:
    """Adapt a stage, which takes a list of gradients, to a receiver, which has one."""
    return lambda member, gradient: stage([(member, gradient)])
