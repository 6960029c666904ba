"""The average of held gradients over processes, once a step: after the last micro-batch's backward, or in step()."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import RefusedError
from ..autograd.passes import at_end_of_pass, is_nested, pass_number, weakly
from .protocol import Communication


class HeldAverage:
    """Averages held gradients in place.

    Args:
        communication: computes the averages.
        held: returns the parameters whose gradients are held.
        attach: registers parameters that were unfrozen since with `communication`.
        due: returns whether this is the last micro-batch, after which user code looks at the gradients before step() and must
            see the same on every process; None: step() averages.
        lock: of the release.
    """

    def __init__(
        self,
        communication: Communication,
        *,
        held: Callable[[], list[Tensor]],
        attach: Callable[[], object],
        due: Callable[[], bool] | None,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._communication = communication
        self._held = held
        self._attach = attach
        self._due = due
        self._lock = lock
        self._done = False  # in this step
        self._watched: int | None = None  # number of the pass at whose end a callback runs

    def gradient_held(self) -> None:
        """Have the average taken after the running pass, if that is the last micro-batch."""
        if self._due is None or is_nested() or not self._due():
            return
        now = pass_number()
        if now is None or now != self._watched:
            self._watched = now
            at_end_of_pass(weakly(self._after_pass))

    @torch.no_grad()
    def _after_pass(self) -> None:
        with self._lock:
            self._watched = None
            self._attach()  # gradients of unfrozen parameters are averaged with the others
            self._communication.average([parameter for parameter in self._held() if parameter.grad is not None])
            self._done = True

    def step(self, waiting: Sequence[Tensor]) -> None:
        """Average `.grad` of these parameters before step() uses it, unless that was done after the last pass."""
        if not self._done:
            self._communication.average(waiting)

    def require_judged(self) -> None:
        """Raise `RefusedError` if a scaler has judged held gradients before they were averaged, on each process its own."""
        if self._due is not None and not self._done and self._held():
            raise RefusedError(
                "the scaler has judged held gradients that were not averaged over the processes yet: sync() was True in no "
                "backward of this step, or all of it ran under reentrant checkpointing. sync() must be True in the last "
                "micro-batch; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def close(self) -> None:
        """End the step."""
        self._done, self._watched = False, None
