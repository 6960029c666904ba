"""DistributedDataParallel: a communication hook averages its buckets, and delivers their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import RefusedError
from .local import LocalCommunication
from .protocol import Deliver, RoundKind

_HOOKED: weakref.WeakKeyDictionary[nn.Module, _BucketHook] = weakref.WeakKeyDictionary()
"""The hook of each model. DistributedDataParallel takes one hook for ever; without a release it only averages."""


class DDPCommunication(LocalCommunication):
    """Delivers the gradients of a bucket once it is averaged, while the backward still runs.

    DistributedDataParallel keeps its buckets, and at the end of the backward puts the averaged gradients into `.grad` (copies,
    or views of the buckets with gradient_as_bucket_view=True); markers replace those of released parameters after the pass.
    Gradients are multiplied by 1/world_size and then summed, as without a hook: bit for bit the same. (Views that a plain loop
    keeps with zero_grad(set_to_none=False) are divided instead; under release no gradient is kept.)
    """

    name = "ddp"

    def __init__(self, model: nn.parallel.DistributedDataParallel) -> None:
        if model not in _HOOKED:
            hook = _BucketHook(model.process_group)
            try:
                model.register_comm_hook(hook, _average_bucket)
            except RuntimeError as error:
                raise RefusedError(
                    "this DistributedDataParallel has a communication hook of its own already, and takes only one. Construct "
                    "it without (no register_comm_hook), or use the plain module: release_gradients(module, optimizer) "
                    "averages its gradients by itself."
                ) from error
            _HOOKED[model] = hook
        self._hook = _HOOKED[model]
        self._model = weakref.ref(model)
        self._parameters: set[Tensor] = set()
        self._used: set[Tensor] = set()  # on this rank, since the last averaged pass
        self._local: set[Tensor] = set()  # parameters whose `.grad` is not averaged
        self._freed: dict[Tensor, Tensor | None] = {}  # markers of used gradients, to be put into `.grad` after the pass

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, round_kind: Callable[[], RoundKind]) -> None:
        super().attach(parameters, deliver, round_kind)
        self._parameters.update(parameters)
        self._hook.communication = weakref.ref(self)

    def detach(self) -> None:
        self._hook.communication = None
        self._freed = dict.fromkeys(self._freed)
        self.flush()

    def accumulates_locally(self) -> bool:
        """Whether the pass runs inside no_sync()."""
        model = self._model()
        return model is not None and not model.require_backward_grad_sync

    def gradient_held(self, parameter: Tensor) -> None:
        self._used.add(parameter)
        self._local.add(parameter)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Record that this process has a gradient; the hook delivers the average."""
        if not getattr(self._model(), "_divide_by_initial_world_size", True):  # torch sets it inside join()
            raise RefusedError(
                "DistributedDataParallel.join(divide_by_initial_world_size=False) divides by the number of processes that "
                "still have data, which release does not know; use join() with its default, True."
            )
        self.gradient_held(parameter)

    def flush(self, *, always: bool = False) -> None:
        """Put markers in place of used gradients, which DistributedDataParallel has put back into `.grad`."""
        for parameter, placed in self._freed.items():
            parameter.grad = placed
        self._freed.clear()

    def free_after_pass(self, member: Any) -> None:
        """Free the gradient, and have its marker put into `.grad` after DistributedDataParallel has copied the average there.

        No marker is left where more micro-batches may come: DistributedDataParallel reduces the `.grad` of parameters that a
        micro-batch does not use.
        """
        if member.marker.context.accepts_more:
            member.placeholder = None
        member.parameter.grad = None
        self._freed[member.parameter] = member.placeholder

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Check that the last backward ran outside no_sync(), and so has averaged the gradients.

        Raises:
            RefusedError: the last backward did not average them.
        """
        if self._local.intersection(parameters):
            raise RefusedError(
                "optimizer.step(), and gradients were never averaged: the last backward ran inside no_sync(), or its forward "
                "did not go through DistributedDataParallel. Run the last micro-batch's through it, outside no_sync()."
            )

    def end_step(self) -> None:
        self._local.clear()
        self._used.clear()
        self._freed.clear()

    def averaged(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Deliver an averaged bucket. DistributedDataParallel overwrites `.grad` afterwards, as always."""
        own = [parameter.grad for parameter in parameters]
        mine = [i for i, parameter in enumerate(parameters) if parameter in self._parameters and used[i]]
        for i in mine:
            parameters[i].grad = gradients[i]
            self._local.discard(parameters[i])
        self._deliver([parameters[i] for i in mine])
        for i in mine:
            if parameters[i] not in self._freed:
                parameters[i].grad = own[i]

    def used_anywhere(self, parameters: Sequence[Tensor], group: Any) -> tuple[Tensor, Any] | None:
        """Start the all-reduce of a bitmap of used parameters; None where every parameter must be used."""
        model = self._model()
        if model is None or not (model.find_unused_parameters or model.static_graph):
            return None
        device = parameters[0].device
        bits = torch.tensor([parameter in self._used for parameter in parameters], dtype=torch.int32, device=device)
        return bits, dist.all_reduce(bits, group=group, async_op=True)

    def pass_ended(self) -> None:
        """Record that the last bucket of a pass was delivered."""
        self._used.clear()


class _BucketHook:
    """The state of the communication hook: running all-reduces, and the release that gets the averages."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.communication: weakref.ref[DDPCommunication] | None = None
        self.in_flight: list[tuple[Any, Any, tuple[Tensor, Any] | None]] = []
        # Whether a bucket has had an index above 0: in a static graph's first pass all have 0, and none says it is the last.
        self.numbered = False

    def finish_oldest(self, communication: DDPCommunication) -> None:
        """Wait for the oldest bucket, and deliver it."""
        bucket, work, bitmap = self.in_flight.pop(0)
        work.wait()
        parameters = bucket.parameters()
        used = [True] * len(parameters)
        if bitmap is not None:
            bitmap[1].wait()
            used = [bool(bit) for bit in bitmap[0].tolist()]
        communication.averaged(parameters, bucket.gradients(), used)


def _average_bucket(state: _BucketHook, bucket: Any) -> torch.futures.Future[Tensor]:
    """The communication hook: starts the average of this bucket, and delivers the one before."""
    with torch.no_grad():
        buffer = bucket.buffer()
        buffer.mul_(1.0 / dist.get_world_size(state.group))
        work: Any = dist.all_reduce(buffer, group=state.group, async_op=True)
        communication = None if state.communication is None else state.communication()
        if communication is not None:
            state.in_flight.append((bucket, work, communication.used_anywhere(bucket.parameters(), state.group)))
            state.numbered = state.numbered or bucket.index() > 0
            while len(state.in_flight) > (1 if state.numbered and not bucket.is_last() else 0):
                state.finish_oldest(communication)
            if bucket.is_last():
                communication.pass_ended()
        return work.get_future().then(_value)


# torch compares the annotations with these objects, not with their names.
_average_bucket.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[Tensor],
}


def _value(future: Any) -> Tensor:
    return future.value()[0]
