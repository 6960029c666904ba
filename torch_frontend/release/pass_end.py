"""The end of a backward pass that updates parameters: what waits for it is used, and a failure is told to other processes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.errors import PenstockError
from ..autograd.passes import at_end_of_pass, is_nested, pass_number, weakly
from ..communication import Communication
from .hooks import Hooks
from .queue import SmallUpdateQueue
from .step import Step


class PassEnd:
    """Uses the gradients that wait, for other processes or in the queue, when a pass ends.

    Attributes:
        queue: of small gradients, if there is one.
        in_guard: guard() runs this pass, and ends it itself.

    Args:
        then: called at the end of a pass that is not nested.
    """

    def __init__(self, step: Step, communication: Communication, hooks: Hooks, *, then: Callable[[], None]) -> None:
        self.queue: SmallUpdateQueue | None = None
        self.in_guard = False
        self._step = step
        self._communication = communication
        self._hooks = hooks
        self._then = then
        self._watched: int | None = None  # number of the pass that updates parameters and at whose end a callback runs

    def watch(self) -> bool:
        """Have what waits used when the running pass ends; return False if that is impossible."""
        if self.in_guard:
            return True
        now = pass_number()
        if now is not None and now == self._watched:
            return True
        if not is_nested():  # an earlier pass may have failed, and its step was not closed
            self.end_failed()
        noticed = at_end_of_pass(weakly(self._end))
        self._watched = now if noticed else None
        return noticed

    @torch.no_grad()
    def _end(self) -> None:
        step = self._step
        with step.lock:
            self._watched = None
            try:
                if not is_nested():
                    self._communication.flush(always=True)
                if self.queue is not None:
                    self.queue.flush()
            except PenstockError:
                step.context.refused = True
                raise
            if step.completed:
                step.complete()  # after the updates that have come just now
            if not is_nested():
                self._then()

    def end_failed(self) -> None:
        """If a pass that updates parameters did not reach its end, tell the other processes."""
        if self._watched is not None:
            self._watched = None
            self._communication.fail()
            self._step.remove_from_ledger()

    def discard_refused(self) -> None:
        """Drop the queued gradients of a refused backward, unless other processes take part in it.

        What has no hook may have got a part of it, which cannot be told from what was in `.grad` before.
        """
        self._step.contaminated.update(id(p) for p in self._hooks.without if p.grad is not None)
        if self._communication.name == "local":
            if self.queue is not None:
                self.queue.discard(backward=pass_number())
            self._step.remove_from_ledger()

    def flush(self, *, always: bool = False) -> None:
        """Use the gradients that wait for other processes or in the queue."""
        self._communication.flush(always=always)
        if self.queue is not None:
            self.queue.flush()
