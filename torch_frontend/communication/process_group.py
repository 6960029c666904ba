"""A plain module over a process group: an asynchronous all-reduce for each gradient, in the same order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import Refused
from .agreement import LENGTH, Agreement
from .local import LocalCommunication
from .protocol import Deliver, Purpose
from .shards import is_released

IN_FLIGHT = 2
"""Gradients under way at once: one is reduced while the next is computed; more would only be more memory."""


class ProcessGroupCommunication(LocalCommunication):
    """Averages over a process group. In a round every parameter is all-reduced once, in the same order on every rank.

    Graphs may differ between ranks: a gradient whose turn has not come waits, and when the round ends a rank takes part
    with zeros where it has no gradient. Each all-reduce carries a few numbers more, by which a rank learns whether another had
    a gradient: a parameter that none has used is left alone; and whether all are in the same round, and well (`Agreement`):
    otherwise each of them raises, and none uses the gradient. As in DistributedDataParallel, a gradient is multiplied by
    1/world_size and then summed, in its own dtype; with two ranks the average is the same bit for bit.

    The first round goes backwards through the parameters, later ones as gradients arrived on the first rank in the first.
    """

    name = "process_group"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._share = 1.0 / dist.get_world_size(group)
        self._order: list[Tensor] = []
        self._next = 0  # in the order: who is launched next in this round
        self._waiting: dict[Tensor, Tensor] = {}  # gradients whose turn has not come
        self._in_flight: deque[_Flight] = deque()
        self._arrivals: list[Tensor] | None = []  # of the first round; None once the order is settled
        self._completed = False  # a round, in this step
        self._purpose: Purpose | None = None  # of the round under way
        self._failed = False  # the round under way: what is still to be launched in it is used by no rank
        self._agreement = Agreement()

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        """See `Communication`."""
        super().attach(parameters, deliver, purpose)
        self._ask_purpose = purpose
        if self._failed:
            self._end_failed_round()
        self._order = [*reversed(parameters), *self._order]
        self._arrivals = []
        self._completed = False  # the new ones had no part in a round

    def detach(self) -> None:
        """See `Communication`."""
        for flight in self._in_flight:
            flight.work.wait()
        self._in_flight.clear()
        self._waiting.clear()
        self._order, self._next, self._arrivals = [], 0, []
        self._purpose, self._failed = None, False

    def gradient_ready(self, parameter: Tensor) -> None:
        """See `Communication`."""
        gradient, parameter.grad = parameter.grad, None
        self._begin()
        assert gradient is not None
        self._waiting[parameter] = gradient
        del gradient
        if self._arrivals is not None:
            self._arrivals.append(parameter)
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            self._launch(self._deliver)

    def flush(self, *, always: bool = False) -> None:
        """See `Communication`."""
        if self._failed and not always:
            self._end_failed_round()
        elif self._next or self._waiting or always:
            self._begin()
            self._complete(self._deliver)

    def average(self, parameters: Sequence[Tensor]) -> None:
        """See `Communication`."""
        if self._failed:
            self._end_failed_round()
        if parameters or not self._completed:
            self._begin(step=True)
            self._complete(lambda averaged: None)

    def fail(self) -> None:
        """See `Communication`."""
        self._settle_purpose()
        assert self._purpose is not None
        if self._failed:
            return
        self._failed = True
        self._waiting.clear()
        while self._in_flight and not self._purpose.measured:  # the others use these, as nothing is wrong with them
            self._land(self._deliver)

    def end_step(self) -> None:
        """See `Communication`."""
        self._completed = False

    def _begin(self, *, step: bool = False) -> None:
        """Take part in the round under way, or in a new one; `step`: that of step()."""
        if self._failed:
            self._end_failed_round()
        if self._purpose is None:
            self._agreement.read()
            self._settle_purpose(step=step)

    def _settle_purpose(self, *, step: bool = False) -> None:
        if self._purpose is None:
            purpose = self._ask_purpose()
            self._purpose = purpose._replace(last=True) if step else purpose

    def _end_failed_round(self) -> None:
        """Tell the other ranks, and meet them where the next round begins."""
        self._complete(self._deliver)

    def _complete(self, deliver: Deliver) -> None:
        while self._next < len(self._order):
            parameter = self._order[self._next]
            if parameter.grad is not None and not is_released(parameter.grad) and not self._failed:
                self._waiting[parameter], parameter.grad = parameter.grad, None
            self._launch(deliver)
        while self._in_flight:
            self._land(deliver)
        assert self._purpose is not None
        try:
            self._agreement.end_round(self._purpose, failed=self._failed)
        except Refused:
            self._failed = True  # what is left of the round is to settle the order, with the others
            raise
        self._settle_order()
        self._next, self._purpose, self._failed = 0, None, False
        self._completed = True

    def _launch(self, deliver: Deliver) -> None:
        parameter = self._order[self._next]
        self._next += 1
        buffer = torch.zeros(parameter.numel() + LENGTH, dtype=parameter.dtype, device=parameter.device)
        used = parameter in self._waiting
        if used:
            torch.mul(self._waiting.pop(parameter).reshape(-1), self._share, out=buffer[:-LENGTH])
        assert self._purpose is not None
        buffer[-LENGTH:] = self._agreement.tag(self._purpose, buffer, used=used, failed=self._failed)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._in_flight.append(_Flight(parameter, buffer, work, used))
        while len(self._in_flight) > IN_FLIGHT:
            self._land(deliver)

    def _land(self, deliver: Deliver) -> None:
        parameter, buffer, work, used = self._in_flight.popleft()
        work.wait()
        assert self._purpose is not None
        problem = self._agreement.problem(self._purpose, buffer[-LENGTH:])
        if problem is not None and not self._failed:
            self._failed = True
            self._waiting.clear()
            raise Refused(problem)
        if problem is not None or (self._failed and self._purpose.measured):
            return
        if used or bool(buffer[-LENGTH] > 0):  # only a rank that did not use it has to wait for the device to know
            parameter.grad = buffer[:-LENGTH].view(parameter.shape)
            del buffer
            deliver([parameter])

    def _settle_order(self) -> None:
        """Take the order in which gradients arrived on the first rank, so that few of them wait for their turn."""
        if self._arrivals is None or not self._order:
            return
        position = {} if self._failed else {parameter: number for number, parameter in enumerate(self._arrivals)}
        told = torch.tensor([position.get(p, len(self._order)) for p in self._order], device=self._order[0].device)
        dist.broadcast(told, src=dist.get_global_rank(self._group, 0), group=self._group)
        numbers: list[int] = told.tolist()
        if min(numbers) < len(self._order):  # otherwise there was nothing to learn from
            self._order = [p for _, p in sorted(zip(numbers, self._order, strict=True), key=lambda pair: pair[0])]
            self._arrivals = None
        else:
            self._arrivals = []


class _Flight(NamedTuple):
    """An all-reduce under way: a flat gradient and, behind it, a tag."""

    parameter: Tensor
    buffer: Tensor
    work: Any
    used: bool


def check_alike(model: nn.Module, parameters: Sequence[Tensor], group: Any) -> None:
    """Raise `Refused`, on every rank, unless all train the same parameters and begin with the same values.

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
        raise Refused(
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
        raise Refused(
            f"parameter {list(named)[different[0]]!r} (and {len(different) - 1} more) begins with other values on other ranks. "
            "Seed all ranks alike, or send one rank's values to all: "
            "for p in model.parameters(): torch.distributed.broadcast(p.detach(), src=0)."
        )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, modulo 2^64."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(widths[tensor.element_size()]).sum(dtype=torch.int64)
