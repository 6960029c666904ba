"""What a backend is: the three functions of `core.update`, in place on one parameter and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.moments import Corrections, bias_corrections
from ...core.rules import Rule
from ..array_ops import DTYPES, dtype_name
from ..communication.shards import Shard
from .numbers import GroupSettings, UpdateNumbers, numbers_of, vector_of

_ONE = torch.ones(())

OverShards = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Of the mean squares of the parts of tensors that are stored here, 0-d, in order, those of the whole tensors."""


@dataclasses.dataclass(slots=True, eq=False)
class TensorSlot:
    """One parameter with all that its update reads and writes; the optimizer keeps it from one update to the next.

    parameter: updated in place; any dense shape. Of one that is sharded over processes, the local part.
    state: the optimizer's state of the parameter: "step", 0-d, the number of updates so far; "exp_avg", "exp_avg_sq" and,
        where compensated, "compensation", all of the parameter's shape; "mean_square", 0-d, only while micro-batches are in
        the moments.
    compensation: resolved: "none", "kahan" or "split".
    settings: of the parameter's group, as they are now.
    shard: which part of a sharded parameter this is.
    capturable: "step" is on the parameter's device and must not be waited for.
    kind: shape, dtype and device of the parameter when the slot was made.
    plan: what a backend keeps for this tensor; it goes with the slot, and dataclasses.replace() does not copy it.
    compute_dtype: of the arithmetic.
    """

    parameter: Tensor
    state: Any
    compensation: str
    rule: Rule
    settings: GroupSettings
    capturable: bool = False
    shard: Shard | None = None
    kind: Any = dataclasses.field(default=None, repr=False)
    plan: Any = dataclasses.field(default=None, init=False, repr=False)
    compute_dtype: torch.dtype = dataclasses.field(init=False, repr=False)
    _step: Any = dataclasses.field(default=None, init=False, repr=False)
    _address: int = dataclasses.field(default=0, init=False, repr=False)  # of its memory, which may move; 0 off the host
    _count: Any = dataclasses.field(default=None, init=False, repr=False)  # the memory of "step", seen by numpy

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The validated hyperparameters of the group; the same object as long as none of them changes."""
        return self.settings.hyperparameters

    def __post_init__(self) -> None:
        self.compute_dtype = DTYPES[compute_dtype(dtype_name(self.parameter.dtype))]

    @property
    def corrections(self) -> Corrections:
        """c1 and c2 of this update: numbers, or 0-d tensors in the compute dtype when capturable."""
        if self.capturable:
            return bias_corrections(self.hyperparameters, self.state["step"].to(self.compute_dtype) + 1, torch)
        return self.settings.corrections(self.step_number)

    @property
    def step_number(self) -> float:
        """t of the update that comes next, from 1 on. Synchronises when capturable."""
        return self._counter().item() + 1

    def count(self) -> None:
        """One update more."""
        counter = self._counter()
        if isinstance(counter, Tensor):
            counter.add_(_ONE)
        else:
            counter[()] = counter.item() + 1

    def _counter(self) -> Any:
        """ "step"; on a CPU its memory as numpy sees it, which reads and writes a number in a tenth of the time."""
        step = self.state["step"]
        if step is not self._step or (self._address and step.data_ptr() != self._address):
            on_host = type(step) is Tensor and step.device.type == "cpu"
            self._step, self._address = step, step.data_ptr() if on_host else 0
            self._count = step.numpy() if on_host else step
        return self._count

    def numbers(self) -> UpdateNumbers:
        """The numbers of this update as 0-d tensors in the compute dtype."""
        if self.capturable:
            return numbers_of(self.hyperparameters, self.rule, self.corrections, self.compute_dtype)
        return self.settings.numbers(self.rule, self.step_number, self.compute_dtype)

    def vector(self) -> Tensor:
        """`numbers` as one tensor on the parameter's device, [4]; see `vector_of`."""
        device = self.parameter.device
        if self.capturable:
            return vector_of(self.hyperparameters, self.rule, self.numbers(), device)
        return self.settings.vector(self.rule, self.step_number, self.compute_dtype, device)


class Backend(Protocol):
    """In place, without waiting for the device, and leaving the gradient as it is.

    What the host can find wrong with any tensor of a call is raised before the first one is written to. An error in the midst
    of the updates themselves (a device that fails, memory for scratch that is not there) may leave some of them done, and
    none of them counted in "step".
    """

    name: str
    one_launch: bool
    """Whether `update_all` of many small tensors costs the host about as much as `update` of one."""

    def update_all(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None) -> None:
        """`update`, with first=True, of many tensors at once.

        over_shards: called once, after every gradient was looked at and before anything is written, where the rule clips and
            tensors are shards of others: the learning rate follows from what it returns.
        """
        ...

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """`core.update.update`: the gradient into the moments, and the step.

        measure: return the sum of the gradient's squares in the compute dtype, 0-d, where this backend has it at hand; None
            where it does not.
        """
        ...

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
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

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> Tensor:
        """`Backend.update_all`, of all tensors or of none."""
        ...

    def update_each_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Tensor]:
        """`Backend.update_all`, of those tensors whose own gradient is finite."""
        ...

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        """`Backend.update` with first=True, or nothing."""
        ...
