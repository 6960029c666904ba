"""The bytes of gradient alive, as the state machine says they must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass
class Ledger:
    """Records a gradient when it exists, and removes it when it is freed; a measured run must agree with it.

    live: bytes of gradient alive now. peak: the most there ever were since the last `reset_peak`.
    """

    live: int = 0
    peak: int = 0
    _held: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    def arrive(self, tensor: Hashable, nbytes: int) -> None:
        """The gradient of `tensor` exists; one that is already recorded (it was added to) is not counted twice."""
        self.live += nbytes - self._held.get(tensor, 0)
        self._held[tensor] = nbytes
        if self.live > self.peak:
            self.peak = self.live

    def free(self, tensor: Hashable) -> None:
        """The gradient of `tensor` is gone; nothing happens if there was none."""
        self.live -= self._held.pop(tensor, 0)

    def arrive_and_free(self, tensor: Hashable, nbytes: int) -> None:
        """The gradient of `tensor` came to exist, and is gone."""
        if self._held:
            self.live -= self._held.pop(tensor, 0)
        if self.live + nbytes > self.peak:
            self.peak = self.live + nbytes

    @property
    def recorded(self) -> list[Hashable]:
        """The tensors whose gradients exist."""
        return list(self._held)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak = self.live
