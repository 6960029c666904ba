"""Notices what user code does between backward() and optimizer.step(): parameters written, gradients cleared."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...core.errors import RefusedError
from ..communication.shards import is_released
from .marker_context import MarkerContext
from .member import Member


class UserChanges:
    """Compares released parameters and their markers with what backward() has left."""

    def __init__(self, context: MarkerContext) -> None:
        self._context = context
        self._versions: dict[int, int] = {}  # of the released parameters, at the end of their backward
        self._told_of_clearing = False

    def record(self, released: Iterable[Member]) -> None:
        """Record which version of each parameter the backward has left."""
        self._versions = {member.key: member.parameter._version for member in released}

    def forget(self) -> None:
        """Begin another step."""
        self._versions = {}
        self._told_of_clearing = False

    def check(self, released: Iterable[Member]) -> None:
        """Raise `RefusedError` if one of these parameters was written, or its marker cleared."""
        for member in released:
            version = member.parameter._version
            if self._versions.get(member.key, version) != version:
                raise RefusedError(
                    f"{self._context.describe(member.key)}: it was written between backward(), which had updated it, and "
                    "optimizer.step(), which without release updates it after that. Write to parameters after "
                    "optimizer.step(), or run the backward inside release.paused()."
                )
            if member.parameter.grad is None and member.placeholder is not None:
                raise RefusedError(
                    f"{self._context.describe(member.key)}: its gradient was cleared before optimizer.step(), by "
                    "model.zero_grad() or p.grad = None, and backward() had updated the parameter with it. Call "
                    "optimizer.step() before gradients are cleared; run a backward that is not meant to update the parameters "
                    "inside release.paused(). optimizer.zero_grad() closes this step."
                )

    def check_moments(self, members: Iterable[Member], joined: Collection[int]) -> None:
        """Raise `RefusedError`, once a step, if user code has cleared gradients that are in the moments.

        Args:
            members: with micro-batches in the moments.
            joined: ids of those with a gradient of release.paused() in `.grad`, too.
        """
        if self._told_of_clearing:
            return
        for member in members:
            gradient = member.parameter.grad
            replaced = gradient is None or not (is_released(gradient) or member.key in joined)
            if replaced and member.placeholder is not None:
                self._told_of_clearing = True
                raise RefusedError(
                    f"{self._context.describe(member.key)}: its gradient was cleared before optimizer.step(), by "
                    "model.zero_grad() or an assignment to p.grad, and backward() had put it into the optimizer's moments, "
                    "which cannot discard it. Clear gradients after optimizer.step(); calling it once more uses what is in "
                    "the moments. With accumulation='hold' gradients may be cleared."
                )
