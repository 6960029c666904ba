"""The composition of the pipeline: what was asked for, and what the parameters are, decide which stages there are.

    arrival -> [average] -> [measure] -> [norm] -> [skip] -> [rescale] -> [clip] -> [queue] -> update -> free

A stage that is not needed does not exist. The base case is arrival -> update -> free.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import RefusedError
from ...core.release import Policy, Status
from ..autograd.passes import at_end_of_pass, is_nested, pass_number, weakly
from ..communication import Communication
from ..communication.held_average import HeldAverage
from ..communication.protocol import Purpose
from ..communication.shards import local, shard_of, sum_over_shards
from ..finiteness import SkipCount
from ..releasable import ReleasableOptimizer
from .hooks import Hooks
from .marker import Disclosure
from .queue import SmallUpdateQueue
from .stages import (
    AccumulatingArrival,
    Arrival,
    Arrived,
    ClipEach,
    Keeping,
    MeasuringArrival,
    Norm,
    Rescale,
    Skip,
    Stage,
    Update,
    leave_marker,
    one_by_one,
)
from .step import Member, Step


class Pipeline:
    """What the gradients of one release go through.

    Attributes:
        arrive: the first stage, called by the hooks.
        use: the stage that averaged gradients go on to.
        update: the last stage.
        step: the step that is under way.
        decided_scale: of the loss whose gradient guard() has judged in this step.
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
        self.optimizer = optimizer
        self.communication = communication
        self.scaler = scaler
        self.max_norm = max_norm if clipping == "exact" else None
        self.max_norm_of_each = max_norm if clipping == "per_tensor" else None
        self.hooks = Hooks(self, model)
        self.disclosure = Disclosure(
            self.hooks.describe,
            takes_more=policy is Policy.STATE,
            tells_norms=strict and policy is not Policy.STATE,
            strict=strict,
            max_norm=self.max_norm,
            scaled=scaler is not None,
        )
        one_pass = strict and policy is Policy.RELEASE
        self.step = Step(optimizer, self.disclosure, policy, strict=strict, one_pass=one_pass)
        self.skip_count = SkipCount()
        self.held_average = HeldAverage(
            communication, held=weakly(self._held), attach=weakly(self.attach), due=averages, lock=self.step.lock
        )
        self.decided_scale: float | None = None  # of the loss whose gradient guard() has judged in this step
        self.queue: SmallUpdateQueue | None = None
        self._norm: Tensor | None = None
        self.disclosure.after_refusal = weakly(self._discard_refused)
        self._last = last
        self.paused = 0  # contexts that leave gradients in `.grad`
        self._in_guard = self._measures = False
        self.compose()

    # -- composition ----------------------------------------------------------------------------------------------------

    def compose(self) -> None:
        """Build the pipeline that what was asked for, and what the parameters are, need."""
        step = self.step
        free = getattr(self.communication, "free_after_pass", leave_marker)  # DistributedDataParallel uses `.grad` itself
        self.update = Update(step, self.skip_count, free)
        stage: Any = self.update
        if self.optimizer.launches_together:
            if self.queue is None:
                self.queue = SmallUpdateQueue(step, self.update, free, self._watch_pass)
            stage = self.queue
        if self.max_norm_of_each is not None:
            stage = ClipEach(self.disclosure, self.max_norm_of_each, stage)
        self._rescale = Rescale(stage)
        if self.optimizer.on_nonfinite != "propagate":
            stage = Skip(step, self.skip_count, stage)
        short = self.alone and self.update in (stage, getattr(stage, "following", None))
        one = stage.one if short and not self.optimizer.may_check_on_device else None
        if self.disclosure.tells_norms and not isinstance(stage, (ClipEach, Skip)):
            stage = Norm(self.disclosure, stage)
        self.use = self._rescale if self.needs_guard else stage  # what averaged gradients go on to
        after_arrival = one_by_one(stage) if self.alone else self._average
        before = None if self.queue is None else self.queue.before
        kept = Keeping(step, self._keep, begin=lambda parameter: None)
        if self.paused:
            self.arrive = kept
        elif step.policy is Policy.RELEASE:
            check = self._refuse_unguarded if self.needs_guard else before
            self.arrive = Arrival(step, one or after_arrival, check)
        else:
            keep = functools.partial(self._keep, averages=True)
            self.arrive = AccumulatingArrival(step, after_arrival, before, self._begin_micro_batch, keep=keep)
        if self.communication.name == "ddp" and not self.paused:  # inside no_sync() it only adds up
            arrive = self.arrive
            self.arrive = lambda parameter: (kept if self.communication.keeps() else arrive)(parameter)

    @contextlib.contextmanager
    def measuring(self, measurement: Any) -> Iterator[None]:
        """Gradients in this context are measured, and change nothing."""

        def check(parameter: Tensor) -> None:
            self.step.check_whole(parameter, seen=parameter in measurement.norms)

        with self._instead(MeasuringArrival, measurement, check, functools.partial(self.step.begin_pass, measures=True)):
            yield

    @contextlib.contextmanager
    def updating(self, factors: Sequence[Tensor | float]) -> Iterator[None]:
        """Gradients in this context were measured: each is multiplied by these factors and used.

        So are those that are delivered after it: what has waited in a pass that failed.
        """
        self._rescale.factors = factors
        with self._instead(Arrival, self._rescale, None if self.queue is None else self.queue.before):
            yield

    @contextlib.contextmanager
    def _instead(self, arrival: type[Arrival], stage: Stage, check: Any, begin: Any = None) -> Iterator[None]:
        self.step.refresh()
        before = self.arrive, self.use
        self.use, self._in_guard, self._measures = stage, True, arrival is MeasuringArrival
        self.arrive = arrival(self.step, one_by_one(stage) if self.alone else self._average, check, begin)
        try:
            yield
        finally:
            self.arrive, self.use = before
            self._in_guard = self._measures = False

    # -- stages that belong to the release ------------------------------------------------------------------------------

    def _average(self, member: Member, gradient: Tensor) -> None:
        """Hand a gradient to communication, which hands it back to `deliver`."""
        parameter = member.parameter
        self._watch_pass()
        if member.shard is None and parameter.grad is not gradient:  # it was added to a marker
            parameter.grad = gradient
        self.step.ledger.arrive(member.key, member.nbytes)
        self.communication.gradient_ready(parameter)

    @torch.no_grad()
    def deliver(self, parameters: Sequence[Tensor]) -> None:
        """Communication hands over averaged gradients in `.grad`."""
        step = self.step
        with step.lock:
            if not self._measures and self._keeps:  # averaged in a backward that only adds up
                return
            arrived: list[Arrived] = []
            for parameter in parameters:
                gradient, member = parameter.grad, step.members.get(id(parameter))
                if gradient is None or member is None:  # it has left its group
                    continue
                arrived.append((member, gradient if member.shard is None else local(gradient)))
                step.ledger.arrive(member.key, member.nbytes)
                if step.policy is Policy.RELEASE and not self._measures:
                    step.released[member.key] = member  # this process may have had no gradient
            if arrived:
                self.use(arrived)

    def _keep(self, member: Member, gradient: Tensor, averages: bool = False) -> None:
        """A gradient stays in `.grad`."""
        self.step.ledger.arrive(member.key, member.nbytes)
        self.communication.held(member.parameter)
        if averages:
            self.held_average.gradient_held()

    @property
    def _keeps(self) -> bool:
        holds = self.step.policy is Policy.HOLD and not self.step.last
        return bool(self.paused) or holds or self.communication.keeps()

    def _begin_micro_batch(self, parameter: Tensor) -> None:
        self.step.last = bool(self._last())  # asked once a pass
        self.step.begin_pass(parameter)

    def _refuse_unguarded(self, parameter: Tensor) -> None:
        described = self.hooks.describe(id(parameter))
        if self.scaler is not None:
            raise RefusedError(
                f"{described}: with a scaler, the first update needs to know that the whole gradient is finite. Call "
                "scaler.scale(release.guard(loss)).backward(), with all of the loss in guard(), or use accumulation='hold'."
            )
        raise RefusedError(
            f"{described}: max_norm={self.max_norm} needs the norm of the whole gradient before the first update. "
            "Call release.guard(loss).backward(), with all of the loss in guard(), or use accumulation='hold', or "
            "clipping='per_tensor'."
        )

    @property
    def needs_guard(self) -> bool:
        """Whether gradients may be used only in the second pass of guard()."""
        return self.step.policy is Policy.RELEASE and (self.max_norm is not None or self.scaler is not None)

    # -- the end of a pass ----------------------------------------------------------------------------------------------

    def _watch_pass(self) -> bool:
        """Have the end of the running pass noticed: what waits is used then. False if it will not be noticed."""
        if self._in_guard:  # which ends its passes itself
            return True
        now = pass_number()
        if now is not None and now == self.step.watched:
            return True
        if not is_nested():  # one that failed before, and nothing has closed its step since
            self.end_failed_pass()
        noticed = at_end_of_pass(weakly(self._end_of_pass))
        self.step.watched = now if noticed else None
        return noticed

    @torch.no_grad()
    def _end_of_pass(self) -> None:
        with self.step.lock:
            self.step.watched = None
            if not is_nested():
                self.communication.flush(always=True)
            if self.queue is not None:
                self.queue.flush()
            if self.communication.name == "fsdp2" and not is_nested():  # later, processes need not ask together
                self.norm()

    def end_failed_pass(self) -> None:
        """If a pass that updates parameters never came to its end, say so to other processes."""
        if self.step.watched is not None:
            self.step.watched = None
            self.communication.fail()
            self.step.remove_from_ledger()

    def _discard_refused(self) -> None:
        """A gradient was refused: nothing of its backward is left to be used, unless it is under way on other processes."""
        if self.alone:
            if self.queue is not None:
                self.queue.discard(backward=pass_number())
            self.step.remove_from_ledger()

    def finish_round(self, *, always: bool = False) -> None:
        """What waits, for other processes or for a launch, is used."""
        self.communication.flush(always=always)
        if self.queue is not None:
            self.queue.flush()

    # -- what release, guard and boundaries ask --------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on the model's parameters that the optimizer holds, that require a gradient, and have none yet.

        Parameters of the optimizer outside the model are updated by step(), as without release.
        """
        fresh = self.hooks.attach([p for group in self.optimizer.param_groups for p in group["params"]])
        if fresh is None:
            return
        self.step.attach(self.hooks.parameters)
        if fresh:
            self.communication.attach(fresh, weakly(self.deliver), weakly(self._purpose))

    @property
    def last_norm(self) -> Tensor | None:
        """`norm` of the last gradient; of sharded parameters as the end of the pass has summed it, on all processes at once."""
        return self._norm if self.communication.name == "fsdp2" else self.norm()

    def norm(self) -> Tensor | None:
        """The global norm of the gradients so far; of sharded ones every process must ask together."""
        squares = self.disclosure.squares
        if not self.disclosure.tells_norms:
            return None
        found = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in squares]
        if not found:
            return torch.zeros((), dtype=torch.float64) if self.disclosure.judged else None
        members = self.step.members
        shards = [members[id(p)].shard if id(p) in members else shard_of(p) for p in found]
        device = squares[id(found[0])].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        totals = sum_over_shards(shards, [squares[id(p)].to(device, wide) for p in found])
        self._norm = torch.stack(totals).sum().sqrt()
        return self._norm

    @property
    def alone(self) -> bool:
        """Whether no other process uses the same gradients: then those that were not used yet need not be."""
        return self.communication.name == "local"

    def scale(self) -> float:
        """What the loss, and so every gradient, is multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Free their gradients unused."""
        for parameter in list(parameters):
            self.step.free(parameter)

    def _purpose(self) -> Purpose:
        return self.step.purpose(measured=self._measures)

    def _held(self) -> list[Tensor]:
        return [member.parameter for member in self.step.with_status(Status.HELD)]
