"""What a backend is: the three functions of `core.update`, in place on one parameter and its state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.moments import Complements, debiased_complements
from ...core.rules import Rule
from ..array_ops import DTYPES, dtype_name

OverShards = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Of the mean squares of the parts of tensors that lie here, 0-d, in order, those of the whole tensors."""


@dataclasses.dataclass(slots=True)
class TensorSlot:
    """One parameter with all that its update reads and writes.

    parameter: updated in place; any dense shape. Of one that is sharded over processes, the part that lies here.
    state: the optimizer's state of the parameter: "step", 0-d, the number of updates so far; "exp_avg", "exp_avg_sq" and,
        where compensated, "compensation", all of the parameter's shape; "mean_square", 0-d, only while micro-batches are in
        the moments.
    compensation: resolved: "none", "kahan" or "split".
    capturable: "step" is on the parameter's device and must not be waited for.
    plan: what a backend keeps for this tensor; it goes with the slot, and dataclasses.replace() does not copy it.
    """

    parameter: Tensor
    state: MutableMapping[str, Any]
    compensation: str
    rule: Rule
    hyperparameters: Hyperparameters
    capturable: bool = False
    _complements: Complements | None = dataclasses.field(default=None, repr=False)
    plan: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)

    @property
    def step_number(self) -> float:
        """t of the update that this slot is for, from 1 on. Waits for the device when capturable."""
        return self.state["step"].item() + 1

    @property
    def complements(self) -> Complements:
        """c1 and c2 of this update: numbers, or 0-d tensors in the compute dtype when capturable."""
        if self._complements is None:
            if self.capturable:
                wide = DTYPES[compute_dtype(dtype_name(self.parameter.dtype))]
                self._complements = debiased_complements(self.hyperparameters, self.state["step"].to(wide) + 1, torch)
            else:
                self._complements = _complements(self.hyperparameters, self.step_number)
        return self._complements


@functools.lru_cache(maxsize=16)
def _complements(current: Hyperparameters, step: float) -> Complements:
    """Those of most parameters are the same: they were all updated equally often."""
    return debiased_complements(current, step, torch)


class Backend(Protocol):
    """In place, without waiting for the device, and leaving the gradient as it is.

    What the host can find wrong with any tensor of a call is raised before the first one is written to. An error in the midst
    of the updates themselves (a device that fails, memory for scratch that is not there) may leave some of them done, and
    none of them counted in "step".

    Every function that takes gradients takes `grad_scale`, too: a 0-d tensor, a factor by which they are multiplied in the
    compute dtype (the inverse of a loss scale, a clip coefficient, or the product of both); None is 1.
    """

    name: str
    one_launch: bool
    """Whether `update_all` of many small tensors costs the host about as much as `update` of one."""

    def update_all(
        self,
        pairs: Sequence[tuple[TensorSlot, Tensor]],
        *,
        grad_scale: Tensor | None = None,
        over_shards: OverShards | None = None,
    ) -> None:
        """`update`, with first=True, of many tensors at once.

        over_shards: called once, after every gradient was looked at and before anything is written, where the rule clips and
            tensors are shards of others: the learning rate follows from what it returns.
        """
        ...

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """`core.update.update`: the gradient into the moments, and the step."""
        ...

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """`core.update.accumulate`: the gradient into the moments; leaves "mean_square" in the state."""
        ...

    def apply(self, slot: TensorSlot) -> None:
        """`core.update.apply`: the step from the moments; takes "mean_square" out of the state."""
        ...


@runtime_checkable
class ChecksOnDevice(Protocol):
    """A backend that leaves everything as it is when a gradient is not finite, without the host knowing.

    What is returned is 0-d float32 on the device: 1 where the update was applied, 0 where it was skipped. It is what "step"
    has to be advanced by. Nothing is written to a tensor before all of what decides about it was looked at.
    """

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, grad_scale: Tensor | None = None) -> Tensor:
        """`Backend.update_all`, of all tensors or of none."""
        ...

    def update_each_if_finite(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, grad_scale: Tensor | None = None
    ) -> list[Tensor]:
        """`Backend.update_all`, of those tensors whose own gradient is finite."""
        ...

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor, *, grad_scale: Tensor | None = None) -> Tensor:
        """`Backend.update` with first=True, or nothing."""
        ...
