"""Leaves that a backward pass is not to add to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class SetAside:
    """The gradients of some leaves, set aside while a pass runs that is not to add to them."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._gradients = {leaf: leaf.grad for leaf in leaves}
        for leaf in self._gradients:
            leaf.grad = None

    def restore(self, *, add: bool = False) -> None:
        """Put them back; with `add`, as if the pass had added to them."""
        for leaf, gradient in self._gradients.items():
            if not add or leaf.grad is None:
                leaf.grad = gradient
            elif gradient is not None:
                leaf.grad = gradient + leaf.grad
