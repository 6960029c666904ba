"""Gradients are used: large ones at once, small ones together with a few others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import Refused
from ...core.release import Action, Decision, Launch, Status, ZeroGrad
from ..communication.shards import is_sharded
from ..optimizers import ReleasableOptimizer
from .backward_pass import is_nested, pass_number
from .conditioning import Conditioning
from .lifecycle import Lifecycle
from .nonfinite import NonFinite

SMALL_BYTES = 2**16
"""Of a small gradient, at most: what its update reads and writes then takes an accelerator a tenth of a microsecond, where
its launch takes the host ten."""

QUEUE_BYTES = 2**20
"""Of gradients that wait on one device, at most."""

QUEUE_SHARE = 16
"""... and at most this part of the largest gradient, so that about one layer's gradient is alive, whatever the model."""


class Launches:
    """Makes of gradients what the optimizer is to see, and has it use them.

    Where the backend updates many tensors in one launch, small gradients wait for each other, out of `.grad` and in the
    ledger. They are used when the next one has no room left, before anything else happens to their parameters, and in any
    case before the backward pass ends. Every update is that of a tensor by itself, so when it comes changes no bit. (Whoever
    reads a parameter in the backward in which it is updated, after its gradient has come, may find the value of before: that
    of the plain optimizer.)

    A backward that fails may leave gradients that wait. They belong to parameters that have not changed: `flush` uses them,
    `discard` and `hold` do not.

    Each device has a queue of its own, as autograd has a thread and streams of its own for each.
    """

    def __init__(
        self,
        optimizer: ReleasableOptimizer,
        lifecycle: Lifecycle,
        conditioning: Conditioning,
        nonfinite: NonFinite,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._optimizer = optimizer
        self._lifecycle = lifecycle
        self._conditioning = conditioning
        self._nonfinite = nonfinite
        self._lock = lock
        self._queues: dict[torch.device, _Queue] = {}
        self._room = 0  # bytes of a queue

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """All released parameters, from now on."""
        self._room = min(QUEUE_BYTES, max(map(_nbytes, parameters), default=0) // QUEUE_SHARE)

    def may_wait(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Whether these gradients, which came together, are one small one that is worth a wait."""
        if len(gradients) != 1 or not self._optimizer.launches_together:
            return False
        return all(self._is_small(gradient) for gradient in gradients.values())

    def checks(self, decisions: Mapping[Tensor, Decision]) -> bool:
        """Whether the device itself leaves out which of these gradients is not finite, and nobody has to wait for it."""
        updates = all(decision.action in (Action.UPDATE, Action.QUEUE) for decision in decisions.values())
        return updates and self._optimizer.checks_on_device(decisions)

    def use(self, gradients: Mapping[Tensor, Tensor], decisions: Mapping[Tensor, Decision], *, check: str = "") -> None:
        """Carry the decisions out, now or, where that is what is decided, soon.

        Args:
            gradients: of the parameters; those that are to be stepped without may be missing.
            decisions: of all parameters.
            check: see `Lifecycle.carry_out`.
        """
        used = [gradient for p, gradient in gradients.items() if decisions[p].action is not Action.DISCARD]
        self._conditioning.apply(used)
        queued = {p: gradients[p] for p, decision in decisions.items() if decision.action is Action.QUEUE}
        for gradient in queued.values():
            if self._queue(gradient).nbytes + _nbytes(gradient) > self._room:
                self.flush(gradient.device)
        decided = [(p, gradients.get(p), decision) for p, decision in decisions.items()]
        self._nonfinite.count_unapplied(self._lifecycle.carry_out(decided, check="" if queued else check))
        for parameter, gradient in queued.items():
            self._queue(gradient).add(parameter, gradient)

    def batches(self, gradients: Mapping[Tensor, Tensor | None]) -> Iterator[list[Tensor]]:
        """The parameters of gradients that are all there: one by one, so that gradients are freed on the way.

        Sharded ones come together, for what they ask of other processes; small ones as far as there is room in a queue.
        """
        sharded = [parameter for parameter in gradients if is_sharded(parameter)]
        if sharded:
            yield sharded
        together: list[Tensor] = []
        room = self._room
        for parameter, gradient in gradients.items():
            if is_sharded(parameter):
                continue
            if gradient is None or not (self._optimizer.launches_together and self._is_small(gradient)):
                yield [parameter]
                continue
            if _nbytes(gradient) > room:
                yield together
                together, room = [], self._room
            together.append(parameter)
            room -= _nbytes(gradient)
        if together:
            yield together

    def before(self, parameter: Tensor) -> None:
        """Something happens to the parameter: what waits is used first."""
        if self._lifecycle.status(parameter) is Status.QUEUED:
            self.flush(parameter.device)

    def require_none_left(self) -> None:
        """Raise `Refused` in a backward that would mix with what one that failed has left."""
        for queue in self._queues.values():
            if queue.backward != pass_number() and not is_nested():
                raise Refused(
                    "a backward() has failed (or still runs), and gradients of it wait for their update, which would change "
                    "what this one computes with. Call optimizer.zero_grad() before the next forward, which discards them, or "
                    "optimizer.step(), which uses them."
                )

    def discard(self) -> None:
        """What waits is forgotten; whoever calls this books it."""
        self._queues.clear()

    def discard_pass(self) -> None:
        """What waits of the pass that is running is discarded."""
        for device in [device for device, queue in self._queues.items() if queue.backward == pass_number()]:
            for parameter in self._queues.pop(device).take():
                self._lifecycle.carry_out([(parameter, None, self._lifecycle.decide(parameter, ZeroGrad()))])

    def hold(self) -> None:
        """What waits is held in `.grad` instead."""
        with self._lock:
            for queue in self._queues.values():
                self._lifecycle.give_back(queue.take())
            self._queues.clear()

    @torch.no_grad()
    def flush(self, device: torch.device | None = None) -> None:
        """Use what waits, on one device or on all. If that fails, the gradients are in `.grad`, as if held."""
        with self._lock:
            for key in list(self._queues) if device is None else [device]:
                queue = self._queues.pop(key, None)
                if queue is None:
                    continue
                gradients = queue.take()
                decided = [(p, gradient, self._lifecycle.decide(p, Launch())) for p, gradient in gradients.items()]
                check = "each" if self._optimizer.checks_on_device(gradients) else ""
                try:
                    self._nonfinite.count_unapplied(self._lifecycle.carry_out(decided, check=check))
                except BaseException:
                    self._lifecycle.give_back(gradients)
                    raise

    def _queue(self, gradient: Tensor) -> _Queue:
        return self._queues.setdefault(gradient.device, _Queue(gradient.device, pass_number()))

    def _is_small(self, gradient: Tensor) -> bool:
        if is_sharded(gradient) or _nbytes(gradient) > min(SMALL_BYTES, self._room):
            return False
        return gradient.untyped_storage().nbytes() <= SMALL_BYTES  # a small part of a buffer keeps all of it alive


@dataclasses.dataclass
class _Queue:
    """Gradients that wait, those of one device and one backward, and the streams on which they were computed."""

    device: torch.device
    backward: int | None
    nbytes: int = 0
    _gradients: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)
    _streams: dict[Tensor, Any] = dataclasses.field(default_factory=dict)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        self._gradients[parameter] = gradient
        self.nbytes += _nbytes(gradient)
        if self.device.type == "cuda":
            self._streams[parameter] = torch.cuda.current_stream(self.device)

    def take(self) -> dict[Tensor, Tensor]:
        """All of them, ready to be used on the current stream."""
        if self.device.type == "cuda":
            now = torch.cuda.current_stream(self.device)
            for parameter, stream in self._streams.items():
                if stream != now:
                    now.wait_stream(stream)
                    self._gradients[parameter].record_stream(now)
        return self._gradients


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
