"""What a backend is: the three functions of `core.update`, in place on one parameter and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...core.hyperparameters import Hyperparameters
from ...core.moments import Complements
from ...core.rules import Rule


@dataclasses.dataclass(slots=True)
class TensorSlot:
    """One parameter with all that its update reads and writes.

    parameter: updated in place; any dense shape. Of one that is sharded over processes, the part that lies here.
    state: the optimizer's state of the parameter: "exp_avg", "exp_avg_sq" and, where compensated, "compensation", all of
        the parameter's shape; "mean_square", 0-d, only while micro-batches are in the moments.
    compensation: resolved: "none", "kahan" or "split".
    """

    parameter: Tensor
    state: MutableMapping[str, Any]
    compensation: str
    rule: Rule
    hyperparameters: Hyperparameters
    complements: Complements


class Backend(Protocol):
    """In place, without waiting for the device, and leaving the gradient as it is."""

    name: str

    def update_all(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> None:
        """`update`, with first=True, of many tensors at once."""
        ...

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """`core.update.update`: the gradient into the moments, and the step."""
        ...

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """`core.update.accumulate`: the gradient into the moments; leaves "mean_square" in the state."""
        ...

    def apply(self, slot: TensorSlot) -> None:
        """`core.update.apply`: the step from the moments; takes "mean_square" out of the state."""
        ...
