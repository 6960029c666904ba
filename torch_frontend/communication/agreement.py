"""The few numbers behind every bucket of gradients, by which processes that are not in the same round notice it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import RefusedError
from .protocol import Purpose

HEAD = 1 + 2 * len(Purpose._fields)
"""Numbers of a tag before those of its gradients: failed, and of each field of `Purpose` whether it is so, and whether not."""

KEPT = 1024
"""Tags that are kept: a model has few, unless which of its gradients are used changes from step to step."""

FAILED = (
    "backward() has failed on one of the processes; its exception there says why. What had not been averaged by then is used "
    "on no process: nothing at all in the first pass of release.guard(). Call optimizer.zero_grad() on every process, and "
    "go on with the next batch on all of them."
)
APART = (
    "the processes are not in the same backward(): this one is in one that {here}, another is not, and their gradients do not "
    "belong together. A process has left out a backward() or an optimizer.step(), or run one more, or has another number of "
    "micro-batches (an exception that was caught, a batch that was skipped, sync= or optimizer_accumulation that differ). "
    "Call each of them equally often on all processes. To go on, call optimizer.zero_grad() on every process, and where "
    "micro-batches were in the moments already go back to a checkpoint."
)
LATE = " This is known one backward later, as nothing waits for an accelerator: go back to a checkpoint."


class Agreement:
    """Writes tags, and reads their sums over processes.

    Where a process says no and another yes, a number is positive that is 0 as long as all agree: a sum of zeros is exact in
    every dtype and for any number of processes.

    A sum on a CPU is read at once. Nothing waits for an accelerator: there the sums of a round are read when the next one
    begins, or at its end if it only measures, before anything is used.
    """

    def __init__(self) -> None:
        self._tags: dict[Any, Tensor] = {}
        self._sums: list[Tensor] = []
        self._unread: _Unread | None = None
        self._told = False  # in the round under way, what was wrong with the last

    def tag(self, purpose: Purpose, like: Tensor, used: Sequence[bool], *, failed: bool) -> Tensor:
        """Of one process, [HEAD + gradients], in the dtype and on the device of `like`. used: which gradients it has."""
        key = (purpose, like.dtype, like.device, failed, *used)
        found = self._tags.get(key)
        if found is None:
            if len(self._tags) >= KEPT:
                self._tags.clear()
            numbers = [failed, *(number for field in purpose for number in (field, not field)), *used]
            found = self._tags[key] = torch.tensor(numbers, dtype=like.dtype, device=like.device)
        return found

    def problem(self, purpose: Purpose, sums: Tensor) -> str | None:
        """Why the gradients before these sums, [HEAD], must not be used; None if no reason is known yet."""
        if reads_at_once(sums):
            return _problem(purpose, sums.tolist())
        self._sums.append(sums.clone())  # the gradients may go before it is read
        return None

    def end_round(self, purpose: Purpose, *, failed: bool) -> None:
        """Every gradient has been handed over. Raises as `read`, unless the round has `failed` and this process knows."""
        sums, self._sums = self._sums, []
        told, self._told = self._told, False
        if not sums or (failed and (purpose.measured or told)):  # every process knows
            return
        highest = torch.stack([x.float().to(sums[0].device) for x in sums]).amax(0)
        self._unread = _Unread(purpose, highest.to("cpu", non_blocking=True), _recorded(highest))
        if purpose.measured:
            self.read()

    def read(self) -> None:
        """Raise `RefusedError` if the processes were apart in a round that was not read yet.

        Where nothing was used but measured, that is its end. Otherwise all raise in the next round, also those that knew
        before: it is left on all alike.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        if unread.event is not None:
            unread.event.synchronize()
        problem = _problem(unread.purpose, unread.sums.tolist())
        if problem is None:
            return
        if unread.purpose.measured:
            raise RefusedError(problem)
        self._told = True
        raise RefusedError(problem + LATE)


class _Unread(NamedTuple):
    """Sums on their way to the host, and what to wait for."""

    purpose: Purpose
    sums: Tensor
    event: Any


def reads_at_once(sums: Tensor) -> bool:
    """Whether reading them makes nobody wait."""
    return sums.device.type == "cpu"


def _recorded(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        return None
    event = torch.get_device_module(tensor.device).Event()
    event.record()
    return event


def _problem(purpose: Purpose, sums: list[float]) -> str | None:
    if sums[0] > 0:
        return FAILED
    for index, (field, here) in enumerate(zip(Purpose._fields, purpose, strict=True)):
        if sums[1 + 2 * index + here] > 0:
            return APART.format(here=_SAID[field][here])
    return None


_SAID = {
    "measured": ("uses its gradients", "measures its gradients (the first pass of release.guard())"),
    "last": ("puts its gradients into the moments", "updates parameters"),
    "first": ("goes on with the micro-batches of an update", "begins an update"),
}
