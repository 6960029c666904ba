"""Small gradients wait for a few others, so that one launch updates them all."""

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
from .stages import Arrived, Free, Update, action_for
from .step import Member, Step

SMALL_BYTES = 2**16
"""Of a small gradient, at most: what its update reads and writes then takes an accelerator a tenth of a microsecond, where
its launch takes the host ten."""

QUEUE_BYTES = 2**20
"""Of gradients that wait on one device, at most."""

QUEUE_SHARE = 16
"""... and at most this part of the largest gradient, so that about one layer's gradient is alive, whatever the model."""


class SmallUpdateQueue:
    """The stage before the update, where the backend updates many tensors in one launch.

    Small gradients wait here, in the ledger and out of `.grad`. They are used when the next one has no room left, before
    anything else happens to their parameters, and in any case before the backward pass ends. Every update is that of a tensor
    by itself, so when it comes changes no bit. (Whoever reads a parameter in the backward in which it is updated, after its
    gradient has come, may find the value of before: that of the plain optimizer.)

    A backward that fails may leave gradients here. They belong to parameters that have not changed: `flush` uses them,
    `discard` and `hold` do not. Each device has a queue of its own, as autograd has a thread and streams of its own for each.

    Args:
        watch: makes sure that the end of the running pass is noticed; whether it will be.
    """

    def __init__(self, step: Step, update: Update, free: Free, watch: Callable[[], bool]) -> None:
        self._step = step
        self._update = update
        self._free = free
        self._watch = watch
        self._queues: dict[torch.device, _Queue] = {}

    @property
    def room(self) -> int:
        """Bytes of a queue."""
        largest = max((member.nbytes for member in self._step.members.values()), default=0)
        return min(QUEUE_BYTES, largest // QUEUE_SHARE)

    def __call__(self, arrived: Sequence[Arrived]) -> None:
        """Let a small gradient that came alone wait, where it completes an update."""
        member, gradient = arrived[0]
        if len(arrived) == 1 and gradient is not None and self._may_wait(member, gradient):
            self._add(member, gradient)
        else:
            self._update(arrived)

    def _may_wait(self, member: Member, gradient: Tensor) -> bool:
        small = member.shard is None and is_small(gradient, self.room)
        return small and action_for(self._step, member, True)[0] is Action.UPDATE and self._watch()

    def _add(self, member: Member, gradient: Tensor) -> None:
        step, device = self._step, gradient.device
        if device in self._queues and self._queues[device].nbytes + gradient.nbytes > self.room:
            self.flush(device)
        step.ledger.arrive(member.key, member.nbytes)
        self._queues.setdefault(device, _Queue(device, pass_number())).add(member, gradient)
        step.set_status(member.key, Status.QUEUED)
        self._free(member)

    def before(self, parameter: Tensor) -> None:
        """Another gradient of the parameter has come: what waits is used first.

        Raises:
            RefusedError: in a backward that would mix with what one that failed has left.
        """
        for queue in self._queues.values():
            if queue.backward != pass_number() and not is_nested():
                raise RefusedError(
                    "a backward() has failed (or still runs), and gradients of it wait for their update, which would change "
                    "what this one computes with. Call optimizer.zero_grad() before the next forward, which discards them, or "
                    "optimizer.step(), which uses them."
                )
        if any(id(parameter) == member.key for queue in self._queues.values() for member in queue.gradients):
            self.flush(parameter.device)

    def discard(self, *, backward: int | None = None) -> None:
        """Forget what waits, or what waits of one backward."""
        for device, queue in list(self._queues.items()):
            if backward is None or queue.backward == backward:
                for member in self._queues.pop(device).gradients:
                    self._step.set_status(member.key, Status.IDLE)
                    self._step.released.pop(member.key, None)
                    self._step.ledger.free(member.key)
                    if member.parameter.grad is member.placed:
                        member.parameter.grad = None

    def hold(self) -> None:
        """What waits is held in `.grad` instead."""
        with self._step.lock:
            for queue in self._queues.values():
                self._give_back(queue.take())
            self._queues.clear()

    @torch.no_grad()
    def flush(self, device: torch.device | None = None) -> None:
        """Use what waits, on one device or on all. If that fails, the gradients are in `.grad`, as if held."""
        step = self._step
        with step.lock:
            for key in list(self._queues) if device is None else [device]:
                queue = self._queues.pop(key, None)
                if queue is None:
                    continue
                gradients = queue.take()
                try:
                    self._update.perform([(member.parameter, g, Action.UPDATE) for member, g in gradients.items()])
                except BaseException:
                    self._give_back(gradients)
                    raise
                for member in gradients:
                    step.set_status(member.key, Status.RELEASED if step.strict else Status.IDLE)
                    step.ledger.free(member.key)

    def _give_back(self, gradients: Mapping[Member, Tensor]) -> None:
        """What waits could not be used: it is held in `.grad`."""
        for member, gradient in gradients.items():
            before = member.parameter.grad
            member.parameter.grad = gradient if before is None or before is member.placed else gradient + before
            self._step.released.pop(member.key, None)
            self._step.set_status(member.key, Status.HELD)


def is_small(gradient: Tensor, room: int) -> bool:
    """Whether a gradient may wait where there is this room; a small part of a buffer keeps all of it alive."""
    if gradient.nbytes > min(SMALL_BYTES, room):
        return False
    return gradient.untyped_storage().nbytes() <= SMALL_BYTES


def batches(step: Step, gradients: Mapping[Tensor, Tensor | None], room: int) -> Iterator[list[Tensor]]:
    """The parameters of gradients that are all there: one by one, so that gradients are freed on the way.

    Sharded ones come together, for what they ask of other processes; small ones as far as there is room in a queue.
    """
    sharded = [parameter for parameter in gradients if is_sharded(parameter)]
    if sharded:
        yield sharded
    together: list[Tensor] = []
    left = room
    for parameter, gradient in gradients.items():
        if is_sharded(parameter):
            continue
        if gradient is None or not is_small(gradient, room):
            yield [parameter]
            continue
        if gradient.nbytes > left and together:
            yield together
            together, left = [], room
        together.append(parameter)
        left -= gradient.nbytes
    if together:
        yield together


@dataclasses.dataclass
class _Queue:
    """Gradients that wait, those of one device and one backward, and the streams on which they were computed."""

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
        """All of them, ready to be used on the current stream."""
        if self.device.type == "cuda":
            now = torch.cuda.current_stream(self.device)
            for member, stream in self._streams.items():
                if stream != now:
                    now.wait_stream(stream)
                    self.gradients[member].record_stream(now)
        return self.gradients
