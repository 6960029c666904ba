"""A plain module over a process group: asynchronous all-reduces of gradients, in the same order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import RefusedError
from . import protocol
from .agreement import HEAD, Agreement
from .local import LocalCommunication
from .protocol import Deliver, Purpose
from .shards import is_released

IN_FLIGHT = 2
"""Buckets under way at once: one is reduced while the next is computed; more would only be more memory."""


class ProcessGroupCommunication(LocalCommunication):
    """Averages over a process group. In a round every parameter is all-reduced once, in the same order on every rank.

    Small gradients that follow each other are reduced together: a bucket. Graphs may differ between ranks: gradients whose
    turn has not come wait, and when the round ends a rank takes part with zeros where it has no gradient. Each all-reduce
    carries a few numbers more, by which a rank learns whether another had a gradient: a parameter that none has used is left
    alone; and whether all are in the same round, and well (`Agreement`): otherwise each of them raises, and none uses the
    gradients. As in DistributedDataParallel, a gradient is multiplied by 1/world_size and then summed, in its own dtype; with
    two ranks the average is the same bit for bit.

    The first round goes backwards through the parameters, later ones as gradients arrived on the first rank in the first.
    """

    name = "process_group"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._share = 1.0 / dist.get_world_size(group)
        self._order: list[Tensor] = []
        self._buckets: list[_Bucket] = []  # of the order
        self._next = 0  # of the buckets: which is launched next in this round
        self._waiting: dict[int, Tensor] = {}  # gradients whose turn has not come, by the id of their parameter
        self._in_flight: deque[_Flight] = deque()
        self._arrivals: list[Tensor] | None = []  # of the first round; None once the order is settled
        self._completed = False  # a round, in this step
        self._purpose: Purpose | None = None  # of the round under way
        self._failed = False  # the round under way: what is still to be launched in it is used by no rank
        self._agreement = Agreement()

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        super().attach(parameters, deliver, purpose)
        self._ask_purpose = purpose
        if self._failed:
            self._end_failed_round()
        self._set_order([*reversed(parameters), *self._order])
        self._arrivals = []
        self._completed = False  # the new ones had no part in a round

    def detach(self) -> None:
        for flight in self._in_flight:
            flight.work.wait()
        self._in_flight.clear()
        self._waiting.clear()
        self._set_order([])
        self._next, self._arrivals = 0, []
        self._purpose, self._failed = None, False

    def gradient_ready(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if self._failed or self._purpose is None:
            self._begin()
        assert gradient is not None
        self._waiting[id(parameter)] = gradient
        del gradient
        if self._arrivals is not None:
            self._arrivals.append(parameter)
        while self._next < len(self._buckets) and self._buckets[self._next].is_full(self._waiting):
            self._launch(self._deliver)

    def flush(self, *, always: bool = False) -> None:
        if self._failed and not always:
            self._end_failed_round()
        elif self._next or self._waiting or always:
            self._begin()
            self._complete(self._deliver)

    def average(self, parameters: Sequence[Tensor]) -> None:
        if self._failed:
            self._end_failed_round()
        if parameters or not self._completed:
            self._begin(step=True)
            self._complete(lambda averaged: None)

    def fail(self) -> None:
        self._settle_purpose()
        assert self._purpose is not None
        if self._failed:
            return
        self._failed = True
        self._waiting.clear()
        while self._in_flight and not self._purpose.measured:  # the others use these, as nothing is wrong with them
            self._land(self._deliver)

    def end_step(self) -> None:
        self._completed = False

    def _begin(self, *, step: bool = False) -> None:
        """Take part in the round under way, or in a new one; `step`: that of step()."""
        if self._failed:
            self._end_failed_round()
        if self._purpose is None:
            self._agreement.read()
            if not all(bucket.fits() for bucket in self._buckets):
                self._set_order(self._order)
            self._settle_purpose(step=step)

    def _settle_purpose(self, *, step: bool = False) -> None:
        if self._purpose is None:
            purpose = self._ask_purpose()
            self._purpose = purpose._replace(last=True) if step else purpose

    def _end_failed_round(self) -> None:
        """Tell the other ranks, and meet them where the next round begins."""
        self._complete(self._deliver)

    def _complete(self, deliver: Deliver) -> None:
        while self._next < len(self._buckets):
            for parameter in self._buckets[self._next].parameters:
                if parameter.grad is not None and not is_released(parameter.grad) and not self._failed:
                    self._waiting[id(parameter)], parameter.grad = parameter.grad, None
            self._launch(deliver)
        while self._in_flight:
            self._land(deliver)
        assert self._purpose is not None
        try:
            self._agreement.end_round(self._purpose, failed=self._failed)
        except RefusedError:
            self._failed = True  # what is left of the round is to settle the order, with the others
            raise
        self._settle_order()
        self._next, self._purpose, self._failed = 0, None, False
        self._completed = True

    def _launch(self, deliver: Deliver) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        found = [self._waiting.pop(key, None) for key in bucket.keys]
        used = [gradient is not None for gradient in found]
        assert self._purpose is not None
        tag = self._agreement.tag(self._purpose, bucket.parameters[0], used, failed=self._failed)
        buffer = bucket.filled(found, self._share, tag)
        del found
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._in_flight.append(_Flight(bucket, buffer, work, used))
        while len(self._in_flight) > IN_FLIGHT:
            self._land(deliver)

    def _land(self, deliver: Deliver) -> None:
        bucket, buffer, work, used = self._in_flight.popleft()
        work.wait()
        assert self._purpose is not None
        sums = buffer[bucket.elements :]
        problem = self._agreement.problem(self._purpose, sums[:HEAD])
        if problem is not None and not self._failed:
            self._failed = True
            self._waiting.clear()
            raise RefusedError(problem)
        if problem is not None or (self._failed and self._purpose.measured):
            return
        if not all(used):  # only a rank that did not use all of them has to wait for the device to know
            used = [number > 0 for number in sums[HEAD:].tolist()]
        delivered = bucket.give_back(buffer, used)
        del buffer, sums
        if delivered:
            deliver(delivered)

    def _set_order(self, order: list[Tensor]) -> None:
        self._order = order
        self._buckets = [_Bucket(parameters) for parameters in _in_buckets(order)]

    def _settle_order(self) -> None:
        """Take the order in which gradients arrived on the first rank, so that few of them wait for their turn."""
        if self._arrivals is None or not self._order:
            return
        position = {} if self._failed else {parameter: number for number, parameter in enumerate(self._arrivals)}
        told = torch.tensor([position.get(p, len(self._order)) for p in self._order], device=self._order[0].device)
        dist.broadcast(told, src=dist.get_global_rank(self._group, 0), group=self._group)
        numbers: list[int] = told.tolist()
        if min(numbers) < len(self._order):  # otherwise there was nothing to learn from
            self._set_order([p for _, p in sorted(zip(numbers, self._order, strict=True), key=lambda pair: pair[0])])
            self._arrivals = None
        else:
            self._arrivals = []


class _Bucket:
    """Parameters, of one dtype and on one device, whose gradients are reduced together.

    keys: their ids, in order. elements: of all gradients, which the buffer holds before a tag.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.keys = [id(parameter) for parameter in parameters]
        self._kind = parameters[0].dtype, parameters[0].device
        self._sizes = [parameter.numel() for parameter in parameters]
        self.elements = sum(self._sizes)

    def is_full(self, gradients: dict[int, Tensor]) -> bool:
        """Whether the gradients of all of its parameters are among these."""
        return len(gradients) >= len(self.keys) and all(key in gradients for key in self.keys)

    def fits(self) -> bool:
        """Whether the parameters are still of the dtype and on the device that the bucket was made for."""
        return all((parameter.dtype, parameter.device) == self._kind for parameter in self.parameters)

    def filled(self, gradients: Sequence[Tensor | None], share: float, tag: Tensor) -> Tensor:
        """A flat tensor of the gradients times `share`, zeros instead of one that is None, and the tag."""
        parts = [
            torch.zeros(size, dtype=tag.dtype, device=tag.device) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(gradients, self._sizes, strict=True)
        ]
        if len(parts) > 1:
            buffer = torch.cat([*parts, tag])
            buffer[: self.elements].mul_(share)
            return buffer
        buffer = torch.empty(self.elements + len(tag), dtype=tag.dtype, device=tag.device)
        torch.mul(parts[0], share, out=buffer[: self.elements])  # a large one is not copied twice
        buffer[self.elements :] = tag
        return buffer

    def give_back(self, buffer: Tensor, used: Sequence[bool]) -> list[Tensor]:
        """Put what is in the buffer into `.grad` of the parameters that were used; return those."""
        parts = zip(self.parameters, buffer[: self.elements].split(self._sizes), used, strict=True)
        given = [(parameter, gradient) for parameter, gradient, is_used in parts if is_used]
        for parameter, gradient in given:
            parameter.grad = gradient.view(parameter.shape)
        return [parameter for parameter, _ in given]


def _in_buckets(order: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in order, cut into buckets of at most `BUCKET_BYTES`, each of one dtype and device."""
    found: list[list[Tensor]] = []
    room = -1  # for nothing yet, not even a tensor without elements
    for parameter in order:
        lead = found[-1][0] if found else parameter
        if parameter.nbytes <= room and parameter.dtype is lead.dtype and parameter.device == lead.device:
            found[-1].append(parameter)
        else:
            found.append([parameter])
            room = protocol.BUCKET_BYTES
        room -= parameter.nbytes
    return found


class _Flight(NamedTuple):
    """An all-reduce under way: of each parameter in the bucket, whether this rank has used it."""

    bucket: _Bucket
    buffer: Tensor
    work: Any
    used: list[bool]


def check_alike(model: nn.Module, parameters: Sequence[Tensor], group: Any) -> None:
    """Raise `RefusedError`, on every rank, unless all train the same parameters and begin with the same values.

    Args:
        model: whose parameters are compared.
        parameters: those that are released, in order.
        group: of the ranks.
    """
    named = dict(model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    here = [[(name, tuple(p.shape), str(p.dtype)) for name, p in named.items()], [names.get(p) for p in parameters]]
    there: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(there, here, group=group)
    if any(other != there[0] for other in there):
        raise RefusedError(
            "the ranks do not train the same parameters (their names, shapes, dtypes or order differ). Construct the same "
            "model and the same optimizer on every rank, and release them on every rank."
        )
    device = next(iter(named.values())).device
    sums = torch.stack([_checksum(parameter).to(device) for parameter in named.values()])
    gathered = [torch.empty_like(sums) for _ in there]
    dist.all_gather(gathered, sums, group=group)
    stacked = torch.stack(gathered)
    different = (stacked != stacked[0]).any(0).nonzero().flatten().tolist()
    if different:
        raise RefusedError(
            f"parameter {list(named)[different[0]]!r} (and {len(different) - 1} more) begins with other values on other ranks. "
            "Seed all ranks alike, or send one rank's values to all: "
            "for p in model.parameters(): torch.distributed.broadcast(p.detach(), src=0)."
        )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, modulo 2^64."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(widths[tensor.element_size()]).sum(dtype=torch.int64)
