"""Tags: a few numbers after every bucket of gradients, by which processes notice that they are not in the same round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import RefusedError
from .protocol import RoundKind

HEAD = 1 + 2 * len(RoundKind._fields)
"""Numbers at the head of a tag: failed, and for each field of `RoundKind` the field and its negation."""

KEPT = 1024
"""Most tags in the cache: a model has few, unless the set of used gradients changes from step to step."""

FAILED = (
    "backward() has failed on one of the processes; its exception there says why. What had not been averaged by then is used "
    "on no process: nothing at all in the first pass of release.guard(). Call optimizer.zero_grad() on every process, and "
    "go on with the next batch on all of them."
)
DISAGREE = (
    "the processes are not in the same backward(): this one is in one that {here}, another is not, and their gradients do not "
    "belong together. A process has left out a backward() or an optimizer.step(), or run one more, or has another number of "
    "micro-batches (an exception that was caught, a batch that was skipped, sync= or optimizer_accumulation that differ). "
    "Call each of them equally often on all processes. To go on, call optimizer.zero_grad() on every process, and where "
    "micro-batches were in the moments already go back to a checkpoint."
)
NOTICED_LATE = " This is known one backward later, as nothing waits for an accelerator: go back to a checkpoint."


class Agreement:
    """Makes tags, and reads their sums over processes.

    If one process disagrees, a number is positive that is otherwise 0; a sum of zeros is exact in every dtype.

    Sums on a CPU are read at once. On an accelerator nothing waits: the sums of a round are read when the next round begins,
    or, if the round only measures, at its end, before anything is used.
    """

    def __init__(self) -> None:
        self._tags: dict[Any, Tensor] = {}
        self._sums: list[Tensor] = []
        self._unread: _Unread | None = None
        self._raised = False  # an error of the previous round was raised in this one

    def tag(self, round_kind: RoundKind, like: Tensor, used: Sequence[bool], *, failed: bool) -> Tensor:
        """Return this process's tag, [HEAD + gradients], in the dtype and on the device of `like`.

        Args:
            used: for each gradient of the bucket, whether this process has it.
        """
        key = (round_kind, like.dtype, like.device, failed, *used)
        found = self._tags.get(key)
        if found is None:
            if len(self._tags) >= KEPT:
                self._tags.clear()
            numbers = [failed, *(number for field in round_kind for number in (field, not field)), *used]
            found = self._tags[key] = torch.tensor(numbers, dtype=like.dtype, device=like.device)
        return found

    def problem(self, round_kind: RoundKind, sums: Tensor) -> str | None:
        """Return why the gradients with these sums, [HEAD], must not be used; None if no reason is known."""
        if reads_at_once(sums):
            return _problem(round_kind, sums.tolist())
        self._sums.append(sums.clone())  # the gradients may go before it is read
        return None

    def end_round(self, round_kind: RoundKind, *, failed: bool) -> None:
        """End a round. Raises as `read` does, unless the round has `failed` and this process knows it."""
        sums, self._sums = self._sums, []
        raised, self._raised = self._raised, False
        if not sums or (failed and (round_kind.measured or raised)):  # every process knows
            return
        highest = torch.stack([x.float().to(sums[0].device) for x in sums]).amax(0)
        self._unread = _Unread(round_kind, highest.to("cpu", non_blocking=True), _recorded(highest))
        if round_kind.measured:
            self.read()

    def unread_problem(self) -> str | None:
        """Return what `read` would raise: None if the processes agreed. It synchronises if sums were not read yet."""
        if self._unread is None:
            return None
        if self._unread.event is not None:
            self._unread.event.synchronize()
        return _problem(self._unread.round_kind, self._unread.sums.tolist())

    def read(self) -> None:
        """Raise `RefusedError` if the processes disagreed in a round whose sums were not read yet.

        A round that only measured ends with this. Otherwise all processes raise in the next round, including those that knew
        before, so that all leave it alike.
        """
        problem, unread, self._unread = self.unread_problem(), self._unread, None
        if unread is None or problem is None:
            return
        if unread.round_kind.measured:
            raise RefusedError(problem)
        self._raised = True
        raise RefusedError(problem + NOTICED_LATE)


class _Unread(NamedTuple):
    """Sums that are being copied to the host, and the event to wait for."""

    round_kind: RoundKind
    sums: Tensor
    event: Any


def reads_at_once(sums: Tensor) -> bool:
    """Whether the sums can be read without a synchronisation."""
    return sums.device.type == "cpu"


def _recorded(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        return None
    event = torch.get_device_module(tensor.device).Event()
    event.record()
    return event


def _problem(round_kind: RoundKind, sums: list[float]) -> str | None:
    if sums[0] > 0:
        return FAILED
    for index, (field, here) in enumerate(zip(RoundKind._fields, round_kind, strict=True)):
        if sums[1 + 2 * index + here] > 0:
            return DISAGREE.format(here=_SAID[field][here])
    return None


_SAID = {
    "measured": ("uses its gradients", "measures its gradients (the first pass of release.guard())"),
    "last": ("puts its gradients into the moments", "updates parameters"),
    "first": ("goes on with the micro-batches of an update", "begins an update"),
}
