"""Gradients that hold an infinity or a NaN: which may be used, and how many were not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...core.errors import NonFiniteGradient
from ..finiteness import SkipCount, finite
from ..optimizers import ReleasableOptimizer


class NonFinite:
    """Judges gradients as the optimizer's `on_nonfinite` says, and counts for the release and for the optimizer."""

    def __init__(self, optimizer: ReleasableOptimizer) -> None:
        self._optimizer = optimizer
        self._count = SkipCount()

    @property
    def skipped(self) -> int:
        """What was not used. Waits for the device where only that knows."""
        return self._count.total

    def usable(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, bool]:
        """Which of them may be used; the others are counted. Waits for the device unless all may.

        Raises:
            NonFiniteGradient: on_nonfinite="raise".
        """
        if self._optimizer.on_nonfinite == "propagate":
            return dict.fromkeys(gradients, True)
        usable = dict(zip(gradients, finite(list(gradients.values())), strict=True))
        if self._optimizer.on_nonfinite == "raise" and not all(usable.values()):
            raise NonFiniteGradient("a gradient holds an infinity or a NaN; nothing was updated.")
        self.count(list(usable.values()).count(False))
        return usable

    def count(self, skipped: int = 1) -> None:
        """So many, gradients or steps, were not used."""
        self._count.add(skipped)
        self._optimizer.count_skipped(skipped)

    def count_unapplied(self, applied: Sequence[Tensor]) -> None:
        """What the optimizer left out, as it says and has counted itself."""
        self._count.add_unapplied(applied)
