"""A plain module over a process group: asynchronous all-reduces of gradients, in the same order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import RefusedError
from . import protocol
from .agreement import HEAD, Agreement
from .local import LocalCommunication
from .protocol import Deliver, RoundKind
from .shards import is_released

IN_FLIGHT = 2
"""Most all-reduces at a time: one runs while the next gradients are computed; more would only take memory."""


class ProcessGroupCommunication(LocalCommunication):
    """Averages over a process group: in a round every parameter is all-reduced once, in the same order on every rank.

    Consecutive small gradients are reduced together, as a bucket. Graphs may differ between ranks: a gradient waits for its
    turn, and at the end of the round a rank takes part with zeros for gradients that it does not have. A tag after each bucket
    says which ranks have a gradient, so that a parameter that none has used is left alone, and whether all ranks are in the
    same round without a failure (`Agreement`); otherwise every rank raises, and none uses the gradients. As in
    DistributedDataParallel, gradients are multiplied by 1/world_size and summed in their own dtype; with two ranks the average
    is the same bit for bit.

    The first round goes through the parameters in reverse; later rounds follow the order in which gradients came on the first
    rank in the first round.
    """

    name = "process_group"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._share = 1.0 / dist.get_world_size(group)
        self._order: list[Tensor] = []
        self._buckets: list[_Bucket] = []
        self._next = 0  # index of the bucket that is launched next in this round
        self._waiting: dict[int, Tensor] = {}  # gradients whose turn has not come, by the id of their parameter
        self._in_flight: deque[_Reduction] = deque()
        self._first_order: list[Tensor] | None = []  # parameters in the first round; None once the order is settled
        self._completed = False  # a round was completed in this step
        self._round_kind: RoundKind | None = None  # of the current round
        self._failed = False  # the current round has failed: no rank uses the rest of it
        self._agreement = Agreement()

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, round_kind: Callable[[], RoundKind]) -> None:
        super().attach(parameters, deliver, round_kind)
        self._ask_round_kind = round_kind
        if self._failed:
            self._end_failed_round()
        self._set_order([*reversed(parameters), *self._order])
        self._first_order = []
        self._completed = False  # the new parameters have had no round

    def detach(self) -> None:
        for flight in self._in_flight:
            flight.work.wait()
        self._in_flight.clear()
        self._waiting.clear()
        self._set_order([])
        self._next, self._first_order = 0, []
        self._round_kind, self._failed = None, False

    def gradient_ready(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if self._failed or self._round_kind is None:
            self._begin()
        assert gradient is not None
        self._waiting[id(parameter)] = gradient
        del gradient
        if self._first_order is not None:
            self._first_order.append(parameter)
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
        self._settle_round_kind()
        assert self._round_kind is not None
        if self._failed:
            return
        self._failed = True
        self._waiting.clear()
        while self._in_flight and not self._round_kind.measured:  # the other ranks use these, which are complete
            self._finish_oldest(self._deliver)

    def has_failed_elsewhere(self) -> bool:
        return self._agreement.unread_problem() is not None

    def end_step(self) -> None:
        self._completed = False

    def _begin(self, *, step: bool = False) -> None:
        """Begin a round, unless one has begun. step: step() calls."""
        if self._failed:
            self._end_failed_round()
        if self._round_kind is None:
            self._agreement.read()
            if not all(bucket.fits() for bucket in self._buckets):
                self._set_order(self._order)
            self._settle_round_kind(step=step)

    def _settle_round_kind(self, *, step: bool = False) -> None:
        if self._round_kind is None:
            round_kind = self._ask_round_kind()
            self._round_kind = round_kind._replace(last=True) if step else round_kind

    def _end_failed_round(self) -> None:
        """Tell the other ranks of the failure, and end the round with them."""
        self._complete(self._deliver)

    def _complete(self, deliver: Deliver) -> None:
        while self._next < len(self._buckets):
            for parameter in self._buckets[self._next].parameters:
                if parameter.grad is not None and not is_released(parameter.grad) and not self._failed:
                    self._waiting[id(parameter)], parameter.grad = parameter.grad, None
            self._launch(deliver)
        while self._in_flight:
            self._finish_oldest(deliver)
        assert self._round_kind is not None
        try:
            self._agreement.end_round(self._round_kind, failed=self._failed)
        except RefusedError:
            self._failed = True  # the order is still to be settled, with the other ranks
            raise
        self._settle_order()
        self._next, self._round_kind, self._failed = 0, None, False
        self._completed = True

    def _launch(self, deliver: Deliver) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        found = [self._waiting.pop(key, None) for key in bucket.keys]
        used = [gradient is not None for gradient in found]
        assert self._round_kind is not None
        tag = self._agreement.tag(self._round_kind, bucket.parameters[0], used, failed=self._failed)
        buffer = bucket.filled(found, self._share, tag)
        del found
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._in_flight.append(_Reduction(bucket, buffer, work, used))
        while len(self._in_flight) > IN_FLIGHT:
            self._finish_oldest(deliver)

    def _finish_oldest(self, deliver: Deliver) -> None:
        bucket, buffer, work, used = self._in_flight.popleft()
        work.wait()
        assert self._round_kind is not None
        sums = buffer[bucket.elements :]
        problem = self._agreement.problem(self._round_kind, sums[:HEAD])
        if problem is not None and not self._failed:
            self._failed = True
            self._waiting.clear()
            raise RefusedError(problem)
        if problem is not None or (self._failed and self._round_kind.measured):
            return
        if not all(used):  # only a rank that lacks one of the gradients has to synchronise
            used = [number > 0 for number in sums[HEAD:].tolist()]
        delivered = bucket.give_back(buffer, used)
        del buffer, sums
        if delivered:
            deliver(delivered)

    def _set_order(self, order: list[Tensor]) -> None:
        self._order = order
        self._buckets = [_Bucket(parameters) for parameters in _in_buckets(order)]

    def _settle_order(self) -> None:
        """Adopt the order in which gradients came on the first rank, so that few have to wait for their turn."""
        if self._first_order is None or not self._order:
            return
        position = {} if self._failed else {parameter: number for number, parameter in enumerate(self._first_order)}
        positions = torch.tensor([position.get(p, len(self._order)) for p in self._order], device=self._order[0].device)
        dist.broadcast(positions, src=dist.get_global_rank(self._group, 0), group=self._group)
        numbers: list[int] = positions.tolist()
        if min(numbers) < len(self._order):  # otherwise the first rank has had no gradient
            self._set_order([p for _, p in sorted(zip(numbers, self._order, strict=True), key=lambda pair: pair[0])])
            self._first_order = None
        else:
            self._first_order = []


class _Bucket:
    """Parameters of one dtype and device whose gradients are reduced together.

    Attributes:
        keys: ids of the parameters, in order.
        elements: total number of gradient elements, which come before the tag in the buffer.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.keys = [id(parameter) for parameter in parameters]
        self._kind = parameters[0].dtype, parameters[0].device
        self._sizes = [parameter.numel() for parameter in parameters]
        self.elements = sum(self._sizes)

    def is_full(self, gradients: dict[int, Tensor]) -> bool:
        """Whether these include the gradients of all parameters."""
        return len(gradients) >= len(self.keys) and all(key in gradients for key in self.keys)

    def fits(self) -> bool:
        """Whether all parameters still have the bucket's dtype and device."""
        return all((parameter.dtype, parameter.device) == self._kind for parameter in self.parameters)

    def filled(self, gradients: Sequence[Tensor | None], share: float, tag: Tensor) -> Tensor:
        """Return the gradients times `share`, with zeros for None, and the tag, [elements + tag]."""
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
        """Put the averages into `.grad` of the parameters that were used; return these parameters."""
        parts = zip(self.parameters, buffer[: self.elements].split(self._sizes), used, strict=True)
        given = [(parameter, gradient) for parameter, gradient, is_used in parts if is_used]
        for parameter, gradient in given:
            parameter.grad = gradient.view(parameter.shape)
        return [parameter for parameter, _ in given]


def _in_buckets(order: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide the parameters, in order, into buckets of at most `BUCKET_BYTES`, each of one dtype and device."""
    found: list[list[Tensor]] = []
    capacity = -1  # no bucket yet, which could take even a tensor without elements
    for parameter in order:
        lead = found[-1][0] if found else parameter
        if parameter.nbytes <= capacity and parameter.dtype is lead.dtype and parameter.device == lead.device:
            found[-1].append(parameter)
        else:
            found.append([parameter])
            capacity = protocol.BUCKET_BYTES
        capacity -= parameter.nbytes
    return found


class _Reduction(NamedTuple):
    """A running all-reduce; used: for each parameter of the bucket, whether this rank has a gradient."""

    bucket: _Bucket
    buffer: Tensor
    work: Any
    used: list[bool]


def check_alike(model: nn.Module, parameters: Sequence[Tensor], settings: Mapping[str, Any], group: Any) -> None:
    """Raise `RefusedError` on every rank unless all train the same parameters, with the same settings and initial values.

    Args:
        model: its parameters are compared.
        parameters: the released ones, in order.
        settings: numbers and strings, by name.
        group: the process group.
    """
    named = dict(model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    here = [[(name, tuple(p.shape), str(p.dtype)) for name, p in named.items()], [names.get(p) for p in parameters]]
    there: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(there, (here, settings), group=group)
    if any(other != there[0][0] for other, _ in there):
        raise RefusedError(
            "the ranks do not train the same parameters (their names, shapes, dtypes or order differ). Construct the same "
            "model and the same optimizer on every rank, and release them on every rank."
        )
    for rank, (_, others) in enumerate(there):
        for setting, value in there[0][1].items():
            if others.get(setting) != value:
                raise RefusedError(
                    f"{setting} is {value!r} on rank 0 of the process group and {others.get(setting)!r} on rank {rank}, which "
                    "would train apart; give release_gradients and the optimizer the same settings on every rank."
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
    """Return the sum of a tensor's bits as integers, modulo 2^64."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(widths[tensor.element_size()]).sum(dtype=torch.int64)
