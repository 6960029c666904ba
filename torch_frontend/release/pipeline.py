"""The composition of the pipeline: the arguments of the release and the kind of parameters decide which stages exist.

    receive -> [average] -> [measure] -> [norm] -> [skip] -> [rescale] -> [clip] -> [queue] -> update -> free

A stage that is not needed does not exist. The base case is receive -> update -> free.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.release import Policy, Status
from ..autograd.passes import weakly
from ..communication import Communication
from ..communication.held_average import HeldAverage
from ..communication.protocol import RoundKind
from ..communication.shards import local, shard_of
from ..finiteness import SkipCount
from ..releasable import ReleasableOptimizer
from .hooks import Hooks
from .marker_context import MarkerContext
from .member import Member
from .pass_end import PassEnd
from .queue import SmallUpdateQueue
from .receivers import AccumulatingReceiver, GradientReceiver, KeepingReceiver, MeasuringReceiver, for_each
from .stages import ClipEach, Norm, ReadyGradient, Rescale, Skip, Stage, Update
from .step import Step


class Pipeline:
    """The stages of one release, and their state. The optimizer holds them, and they hold the optimizer weakly.

    Attributes:
        arrive: the first stage, called by the hooks.
        use: the stage that averaged gradients go on to.
        update: the last stage.
        step: the current step.
        decided_scale: scale of the loss whose gradient guard() has checked in this step.
        paused: number of contexts that leave gradients in `.grad`.
    """

    arrive: Callable[[Tensor], None]

    def __init__(
        self,
        model: nn.Module,
        optimizer: ReleasableOptimizer,
        communication: Communication,
        *,
        policy: Policy,
        strict: bool,
        last: Callable[[], bool],
        averages: Callable[[], bool] | None = None,
        max_norm: float | None = None,
        clipping: str = "exact",
        scaler: Any = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer, weakly(self.drop_stages))
        self.communication = communication
        self.scaler = scaler
        self.max_norm = max_norm if clipping == "exact" else None
        self.max_norm_of_each = max_norm if clipping == "per_tensor" else None
        self.hooks = Hooks(self, model)
        self.context = MarkerContext(
            self.hooks.describe,
            accepts_more=policy is Policy.STATE,
            knows_norms=strict and policy is not Policy.STATE,
            strict=strict,
            max_norm=self.max_norm,
            scaled=scaler is not None,
        )
        self.step = Step(weakref.proxy(optimizer), self.context, policy, strict=strict)
        self.skip_count = SkipCount()
        self.held_average = HeldAverage(
            communication, held=weakly(self._held), attach=weakly(self.attach), due=averages, lock=self.step.lock
        )
        self.pass_end = PassEnd(self.step, communication, self.hooks, then=weakly(self._after_pass))
        self.context.after_refusal = weakly(self.pass_end.discard_refused)
        self.decided_scale: float | None = None
        self._norm: Tensor | None = None
        self._last = last
        self.paused = 0
        self._measures = False
        self.compose()

    @property
    def optimizer(self) -> ReleasableOptimizer:
        """The optimizer, which lives as long as this object is used: it, or the `Release`, holds both."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- composition ----------------------------------------------------------------------------------------------------

    def compose(self) -> None:
        """Build the stages that are needed."""
        step = self.step
        # DistributedDataParallel uses `.grad` itself, after the pass.
        free = getattr(self.communication, "free_after_pass", Member.leave_marker)
        self.update = Update(step, self.skip_count, free)
        stage: Any = self.update
        if self.optimizer._launches_together:
            if self.queue is None:
                self.pass_end.queue = SmallUpdateQueue(step, self.update, free, self.pass_end.watch)
                self.context.measure_queued = weakly(self.pass_end.queue.measure)
            stage = self.queue
        last = stage
        if self.max_norm_of_each is not None:
            stage = ClipEach(self.context, self.max_norm_of_each, stage)
        self._rescale = Rescale(stage)
        if self.optimizer.on_nonfinite != "propagate":
            stage = Skip(step, self.skip_count, stage)
        short = self.single_process and last in (stage, getattr(stage, "next_stage", None))
        one = stage.one if short and not self.optimizer._may_check_on_device else None
        if one is not None and stage is last and not self.context.knows_norms:
            one = functools.partial(one, measure=False)
        if self.context.knows_norms and not isinstance(stage, (ClipEach, Skip)):
            stage = Norm(self.context, stage)
        self.use = self._rescale if self.needs_guard else stage
        receive = for_each(stage) if self.single_process else self._average
        before = None if self.queue is None else self.queue.before
        kept = KeepingReceiver(step, self._keep, begin=lambda parameter: None)
        if self.paused:
            self.arrive = kept
        elif step.policy is Policy.RELEASE:
            check = self.context.refuse_unguarded if self.needs_guard else before
            self.arrive = GradientReceiver(step, one or receive, check)
        else:
            keep = functools.partial(self._keep, averages=True)
            self.arrive = AccumulatingReceiver(step, receive, before, self._begin_micro_batch, keep=keep)
        if self.communication.name == "ddp" and not self.paused:  # inside no_sync() gradients only add up
            arrive = self.arrive
            self.arrive = lambda parameter: (kept if self.communication.accumulates_locally() else arrive)(parameter)

    def drop_stages(self, _: object = None) -> None:
        """Drop the stages, some of which refer to this object, so that no cycle keeps the parameters alive.

        Called by remove(), and once nobody holds the optimizer.
        """
        for name in ("arrive", "use", "update", "_rescale", "held_average"):
            self.__dict__.pop(name, None)
        self.pass_end.queue = None

    @contextlib.contextmanager
    def measuring(self, measurement: Any) -> Iterator[None]:
        """Measure the gradients of the backward in this context; nothing else changes."""

        def check(parameter: Tensor) -> None:
            self.step.check_not_partial(parameter, seen=parameter in measurement.norms)

        with self._instead(MeasuringReceiver, measurement, check, functools.partial(self.step.begin_pass, measures=True)):
            yield

    @contextlib.contextmanager
    def updating(self, factors: Sequence[Tensor | float]) -> Iterator[None]:
        """Multiply the gradients of the backward in this context by these factors, and use them.

        The same holds for gradients of this pass that are delivered later, because the pass has failed.
        """
        self._rescale.factors = factors
        check, begin = None if self.queue is None else self.queue.before, functools.partial(self.step.begin_pass, measured=True)
        with self._instead(GradientReceiver, self._rescale, check, begin):
            yield

    @contextlib.contextmanager
    def _instead(self, arrival: type[GradientReceiver], stage: Stage, check: Any, begin: Any = None) -> Iterator[None]:
        self.step.refresh()
        before = self.arrive, self.use
        self.use, self.pass_end.in_guard, self._measures = stage, True, arrival is MeasuringReceiver
        self.arrive = arrival(self.step, for_each(stage) if self.single_process else self._average, check, begin)
        try:
            yield
        finally:
            self.arrive, self.use = before
            self.pass_end.in_guard = self._measures = False

    # -- stages that belong to the release ------------------------------------------------------------------------------

    def _average(self, member: Member, gradient: Tensor) -> None:
        """Give a gradient to the communication, which calls `deliver` with the average."""
        parameter = member.parameter
        self.pass_end.watch()
        if member.shard is None and parameter.grad is not gradient:  # it was added to a marker
            parameter.grad = gradient
        self.step.ledger.arrive(member.key, member.nbytes)
        self.communication.gradient_ready(parameter)

    @torch.no_grad()
    def deliver(self, parameters: Sequence[Tensor]) -> None:
        """Use averaged gradients, which the communication has put into `.grad`."""
        step = self.step
        with step.lock:
            if not self._measures and self._keeps:  # averaged in a backward whose gradients are kept
                return
            ready: list[ReadyGradient] = []
            for parameter in parameters:
                gradient, member = parameter.grad, step.members.get(id(parameter))
                if gradient is None or member is None:  # the parameter was taken out of its group
                    continue
                ready.append((member, gradient if member.shard is None else local(gradient)))
                step.ledger.arrive(member.key, member.nbytes)
                if step.policy is Policy.RELEASE and not self._measures:
                    step.released[member.key] = member  # this process may have had no gradient of it
            if ready:
                self.use(ready)

    def _keep(self, member: Member, gradient: Tensor, averages: bool = False) -> None:
        """Leave a gradient in `.grad`."""
        self.step.ledger.arrive(member.key, member.nbytes)
        self.communication.gradient_held(member.parameter)
        if averages:
            self.held_average.gradient_held()

    @property
    def _keeps(self) -> bool:
        holds = self.step.policy is Policy.HOLD and not self.step.last
        return bool(self.paused) or holds or self.communication.accumulates_locally()

    def _begin_micro_batch(self, parameter: Tensor) -> None:
        self.step.last = bool(self._last())  # called once a pass
        self.step.begin_pass(parameter)
        for late in () if self.step.strict else self.attach():  # nobody need call step(), which attaches otherwise
            if late.grad is not None:
                self.arrive(late)

    def check_outside(self, parameter: Tensor) -> None:
        """Raise `RefusedError` if a parameter outside the model gets a gradient after others were updated in this step."""
        if not self._keeps:
            with self.step.lock:
                self.step.check_not_ahead(parameter)

    @property
    def needs_guard(self) -> bool:
        """Whether only the second pass of guard() may use gradients."""
        return self.step.policy is Policy.RELEASE and (self.max_norm is not None or self.scaler is not None)

    # -- what release, guard and boundaries ask --------------------------------------------------------------------------

    def attach(self) -> list[Tensor]:
        """Register hooks on the optimizer's parameters that belong to the model, require a gradient, and have none yet.

        Parameters outside the model are updated by step(), as without release.

        Returns:
            The parameters that got a hook.
        """
        fresh = self.hooks.attach([p for group in self.optimizer.param_groups for p in group["params"]])
        if fresh is None:
            return []
        self.step.attach(self.hooks.parameters)
        if fresh:
            self.communication.attach(fresh, weakly(self.deliver), weakly(self._round_kind))
        return fresh

    @property
    def last_norm(self) -> Tensor | None:
        """The global norm of the last gradient; for sharded parameters, as computed at the end of the pass."""
        return self._norm if self.communication.name == "fsdp2" else self.norm()

    def norm(self) -> Tensor | None:
        """Compute the global norm of the gradients so far, 0-d. For sharded parameters this is a collective."""
        self.context.measure_queued()
        members, squares = self.step.members, self.context.squares
        found = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in squares]
        shards = {id(p): members[id(p)].shard if id(p) in members else shard_of(p) for p in found}
        self._norm = self.context.global_norm(shards)
        return self._norm

    def _after_pass(self) -> None:
        if self.communication.name == "fsdp2":  # a collective, which last_norm must not be
            self.norm()

    @property
    def queue(self) -> SmallUpdateQueue | None:
        """The queue of small gradients, where the backend updates many in one launch."""
        return self.pass_end.queue

    @property
    def single_process(self) -> bool:
        """Whether no other process uses these gradients: only then may gradients that were not used yet be dropped."""
        return self.communication.name == "local"

    def scale(self) -> float:
        """The factor that the scaler multiplies the loss by; 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def free_unused(self, parameters: Iterable[Tensor]) -> None:
        """Free the gradients of these parameters without using them."""
        for parameter in list(parameters):
            self.step.free(parameter)

    def _round_kind(self) -> RoundKind:
        return self.step.round_kind(measured=self._measures)

    def _held(self) -> list[Tensor]:
        return [member.parameter for member in self.step.with_status(Status.HELD)]
