"""Gradients with an infinity or a NaN: how they are found, and counted when they are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .clipping import gradient_norm, is_finite
from .communication.shards import Shard, shard_of, sum_over_shards


def finite(gradients: Sequence[Tensor], shards: Sequence[Shard | None], norms: Sequence[Tensor]) -> list[bool]:
    """Return for each gradient whether all elements of all of its shards are finite. It synchronises.

    Args:
        gradients: local parts.
        shards: of their parameters.
        norms: of the local parts, from `gradient_norm`.
    """
    if len(gradients) == 1 and shards[0] is None:
        return [bool(is_finite(gradients[0], norms[0]))]
    faults = [(~is_finite(gradient, norm)).float() for gradient, norm in zip(gradients, norms, strict=True)]
    return [not bool(count) for count in sum_over_shards(shards, faults)]


def each_finite(ready: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return for each (parameter, gradient) whether all elements of all shards are finite. It synchronises."""
    gradients = [gradient for _, gradient in ready]
    return finite(gradients, [shard_of(parameter) for parameter, _ in ready], [gradient_norm(g) for g in gradients])


class SkipCount:
    """Number of skipped gradients or steps: what the host knows, and what a device counts without a synchronisation."""

    def __init__(self, count: int = 0) -> None:
        self._here = count
        self._there: Tensor | None = None

    def add(self, count: int = 1) -> None:
        """Add a number that the host knows."""
        self._here += count

    def add_unapplied(self, applied: Iterable[Tensor]) -> None:
        """Add what a device knows: 0-d float32 tensors, each 0 if it was skipped, otherwise 1."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for flag in applied:
            by_device.setdefault(flag.device, []).append(flag)
        for device, flags in by_device.items():
            if self._there is None:
                self._there = torch.zeros((), dtype=torch.float64, device=device)
            skipped = len(flags) - torch.stack(flags).sum()
            self._there.add_(
                skipped.to(self._there.device, non_blocking=True)
            )  # in place, so that a captured graph counts, too

    def reset(self, count: int = 0) -> None:
        """Set the number; a captured graph counts on from it, too."""
        self._here = count
        if self._there is not None:
            self._there.zero_()

    @property
    def total(self) -> int:
        """The number. It synchronises if a device has counted."""
        return self._here + (0 if self._there is None else int(self._there))
