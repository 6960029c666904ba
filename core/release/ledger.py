"""The bytes of gradient that must be alive according to the state machine; a test compares them with measured ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass
class Ledger:
    """Records gradients when they exist, and removes them when they are freed.

    Attributes:
        live: bytes of gradient alive.
        peak: largest `live` since the last `reset_peak`.
    """

    live: int = 0
    peak: int = 0
    _held: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    def arrive(self, tensor: Hashable, nbytes: int) -> None:
        """Record the gradient of `tensor`; one that was recorded before (autograd has added to it) is not counted twice."""
        self.live += nbytes - self._held.get(tensor, 0)
        self._held[tensor] = nbytes
        if self.live > self.peak:
            self.peak = self.live

    def free(self, tensor: Hashable) -> None:
        """Remove the gradient of `tensor`, if it is recorded."""
        self.live -= self._held.pop(tensor, 0)

    def arrive_and_free(self, tensor: Hashable, nbytes: int) -> None:
        """Record the gradient of `tensor` and remove it."""
        if self._held:
            self.live -= self._held.pop(tensor, 0)
        if self.live + nbytes > self.peak:
            self.peak = self.live + nbytes

    @property
    def recorded(self) -> list[Hashable]:
        """The tensors whose gradients are recorded."""
        return list(self._held)

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are alive."""
        self.peak = self.live
