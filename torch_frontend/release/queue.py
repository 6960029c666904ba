"""The queue of small gradients, which one launch updates together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import RefusedError
from ...core.release import Action, Status
from ..autograd.passes import is_nested, pass_number
from ..communication.shards import is_sharded
from .member import Member
from .stages import Free, ReadyGradient, Update, action_for, record_squares
from .step import Step

SMALL_BYTES = 2**16
"""Largest small gradient: an accelerator updates one in a tenth of a microsecond, and its launch takes the host ten."""

QUEUE_BYTES = 2**20
"""Most bytes of gradient in the queue of one device."""

QUEUE_SHARE = 16
"""A queue holds at most 1/16 of the largest gradient's bytes, so that about one layer's gradient is alive in any model."""


class SmallUpdateQueue:
    """The stage before the update, for a backend that updates many tensors in one launch.

    Small gradients are queued, in the ledger and out of `.grad`. They are used when the queue is full, before anything else
    happens to their parameters, and at the latest when the backward pass ends. The update of a tensor depends on no other, so
    the delay changes no bit. (Code that reads a parameter between its gradient and the end of the backward may see the value
    from before the update, as with the plain optimizer.)

    A backward that fails may leave gradients here, whose parameters have not changed: `flush` uses them, `discard` and
    `move_to_grad` do not. Each device has its own queue, as autograd has a thread and streams for each device.

    Args:
        watch: has `flush` called at the end of the running pass; returns whether that is possible.
    """

    def __init__(self, step: Step, update: Update, free: Free, watch: Callable[[], bool]) -> None:
        self._step = step
        self._update = update
        self._free = free
        self._watch = watch
        self._queues: dict[torch.device, _Queue] = {}
        self._squares = step.context.squares

    @property
    def capacity(self) -> int:
        """Most bytes in one queue."""
        largest = max((member.nbytes for member in self._step.members.values()), default=0)
        return min(QUEUE_BYTES, largest // QUEUE_SHARE)

    def __call__(self, ready: Sequence[ReadyGradient]) -> None:
        """Queue a single small gradient that completes an update; pass others on."""
        member, gradient = ready[0]
        if len(ready) == 1 and gradient is not None and self._may_wait(member, gradient):
            self._add(member, gradient)
        else:
            self._update(ready)

    def one(self, member: Member, gradient: Tensor, *, measure: bool = True) -> None:
        """Queue or update one gradient of the only process.

        Args:
            measure: the norm of the gradient is not recorded yet: its update measures it.
        """
        if not self._may_wait(member, gradient):
            self._update.one(member, gradient, measure=measure)
            return
        if measure:
            self._squares.pop(member.key, None)  # of an earlier step
        self._add(member, gradient)

    def measure(self) -> None:
        """Record the norms of queued gradients, without their update."""
        for queue in self._queues.values():
            unmeasured = self._unmeasured(queue.take())
            if unmeasured:
                record_squares(self._squares, unmeasured)

    def _unmeasured(self, gradients: Mapping[Member, Tensor]) -> dict[Member, Tensor]:
        if not self._step.context.knows_norms:
            return {}
        return {member: gradient for member, gradient in gradients.items() if member.key not in self._squares}

    def _may_wait(self, member: Member, gradient: Tensor) -> bool:
        small = member.shard is None and is_small(gradient, self.capacity)
        return small and action_for(self._step, member, True)[0] is Action.UPDATE and self._watch()

    def _add(self, member: Member, gradient: Tensor) -> None:
        step, device = self._step, gradient.device
        if device in self._queues and self._queues[device].nbytes + gradient.nbytes > self.capacity:
            self.flush(device)
        step.ledger.arrive(member.key, member.nbytes)
        self._queues.setdefault(device, _Queue(device, pass_number())).add(member, gradient)
        step.set_status(member.key, Status.QUEUED)
        self._free(member)

    def before(self, parameter: Tensor) -> None:
        """Flush if the parameter, of which another gradient has come, is queued.

        Raises:
            RefusedError: the queue holds gradients of another backward, which failed.
        """
        for queue in self._queues.values():
            if queue.backward != pass_number() and not is_nested():
                raise RefusedError(
                    "a backward() has failed (or still runs), and gradients of it wait for their update, which would change "
                    "what this one computes with. Call optimizer.zero_grad() before the next forward, which discards them, or "
                    "optimizer.step(), which uses them."
                )
        if self._step.is_queued(parameter):
            self.flush(parameter.device)

    def discard(self, *, backward: int | None = None) -> None:
        """Drop the queued gradients, or those of one backward."""
        for device, queue in list(self._queues.items()):
            if backward is None or queue.backward == backward:
                for member in self._queues.pop(device).gradients:
                    self._step.set_status(member.key, Status.IDLE)
                    self._step.released.pop(member.key, None)
                    self._step.ledger.free(member.key)
                    if member.parameter.grad is member.placeholder:
                        member.parameter.grad = None

    def move_to_grad(self) -> None:
        """Move the queued gradients to `.grad`, where they are held."""
        with self._step.lock:
            for queue in self._queues.values():
                self._give_back(queue.take())
            self._queues.clear()

    @torch.no_grad()
    def flush(self, device: torch.device | None = None) -> None:
        """Use the queued gradients of one device, or of all. If that fails, they are held in `.grad`."""
        step = self._step
        with step.lock:
            for key in list(self._queues) if device is None else [device]:
                queue = self._queues.pop(key, None)
                if queue is None:
                    continue
                gradients = queue.take()
                try:
                    if self._unmeasured(gradients):
                        self._update.together(gradients)
                    else:
                        self._update.perform([(member.parameter, g, Action.UPDATE) for member, g in gradients.items()])
                except BaseException:
                    self._give_back(gradients)
                    raise
                for member in gradients:
                    step.set_status(member.key, Status.RELEASED if step.strict else Status.IDLE)
                    step.ledger.free(member.key)

    def _give_back(self, gradients: Mapping[Member, Tensor]) -> None:
        for member, gradient in gradients.items():
            before = member.parameter.grad
            member.parameter.grad = gradient if before is None or before is member.placeholder else gradient + before
            self._step.released.pop(member.key, None)
            self._step.set_status(member.key, Status.HELD)


def is_small(gradient: Tensor, capacity: int) -> bool:
    """Whether a gradient may be queued. A part of a large buffer may not: it keeps all of the buffer alive."""
    if gradient.nbytes > min(SMALL_BYTES, capacity):
        return False
    return gradient.untyped_storage().nbytes() <= SMALL_BYTES


def batches(step: Step, gradients: Mapping[Tensor, Tensor | None], capacity: int) -> Iterator[list[Tensor]]:
    """Yield the parameters of held gradients in batches, so that gradients are freed on the way.

    All sharded ones are one batch, as their sums are exchanged together; small ones are batched up to `capacity` bytes.
    """
    sharded = [parameter for parameter in gradients if is_sharded(parameter)]
    if sharded:
        yield sharded
    together: list[Tensor] = []
    left = capacity
    for parameter, gradient in gradients.items():
        if is_sharded(parameter):
            continue
        if gradient is None or not is_small(gradient, capacity):
            yield [parameter]
            continue
        if gradient.nbytes > left and together:
            yield together
            together, left = [], capacity
        together.append(parameter)
        left -= gradient.nbytes
    if together:
        yield together


@dataclasses.dataclass
class _Queue:
    """Queued gradients of one device and one backward, and the streams on which they were computed."""

    device: torch.device
    backward: int | None
    nbytes: int = 0
    gradients: dict[Member, Tensor] = dataclasses.field(default_factory=dict)
    _streams: dict[Member, Any] = dataclasses.field(default_factory=dict)

    def add(self, member: Member, gradient: Tensor) -> None:
        self.gradients[member] = gradient
        self.nbytes += gradient.nbytes
        if self.device.type == "cuda":
            self._streams[member] = torch.cuda.current_stream(self.device)

    def take(self) -> dict[Member, Tensor]:
        """Return the gradients, ready to be used on the current stream."""
        if self.device.type == "cuda":
            now = torch.cuda.current_stream(self.device)
            for member, stream in self._streams.items():
                if stream != now:
                    now.wait_stream(stream)
                    self.gradients[member].record_stream(now)
        return self.gradients
