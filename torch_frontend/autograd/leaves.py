"""Saving and restoring the gradients of leaves that a backward pass must not change."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class SavedGradients:
    """Gradients of leaves, removed from `.grad` during a backward pass that must not add to them."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._gradients = {leaf: leaf.grad for leaf in leaves}
        for leaf in self._gradients:
            leaf.grad = None

    def restore(self, *, add: bool = False) -> None:
        """Put the gradients back. add: add what the pass has left in `.grad`, as if it had run with them there."""
        for leaf, gradient in self._gradients.items():
            if not add or leaf.grad is None:
                leaf.grad = gradient
            elif gradient is not None:
                leaf.grad = gradient + leaf.grad
