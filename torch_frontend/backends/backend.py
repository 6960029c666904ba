"""The protocol of a backend: the three functions of `core.update`, in place on one parameter and its state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...core import random_bits
from ...core.codings import EIGHT_BIT, Coded, EightBit, StateDtypes
from ...core.dtypes import compute_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.rules import ADAM, Rule
from ..array_ops import DTYPES, dtype_name
from ..communication.shards import Shard
from .numbers import GroupSettings, UpdateNumbers, numbers_of, vector_of

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


@functools.cache
def state_keys(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a rule's fields in a parameter's state.

    Debiased fields have other keys than torch.optim's biased ones: an optimizer of torch.optim that loads this state finds no
    moment under its own keys, and raises.
    """
    return tuple(field.name if field.beta is None else f"debiased_{field.name}" for field in rule.fields)


def scale_key(key: str) -> str:
    """Return the key of the scales of a field that is kept in 8 bits, whose codes have the key of the field."""
    return f"{key}_scale"


def dtypes_in(keys: Iterable[str], state: Mapping[str, Any]) -> StateDtypes:
    """Return the dtypes of the fields with these keys in a parameter's state."""
    return tuple(EIGHT_BIT if scale_key(key) in state else dtype_name(state[key].dtype) for key in keys)


def _field(key: str, state: Mapping[str, Any]) -> Coded:
    scale = state.get(scale_key(key))
    return state[key] if scale is None else EightBit(state[key], scale)


EXP_AVG, EXP_AVG_SQ = state_keys(ADAM)
"""Those of the rules that keep two moments, for which the eager backend and Triton have arithmetic of their own."""

OverShards = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Takes the mean squares of the shards that this process stores, each 0-d; returns those of the whole tensors, in order."""


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class TensorSlot:
    """One parameter with all that its update reads and writes; the optimizer keeps it between updates.

    parameter: updated in place; any dense shape. For a parameter that is sharded over processes, the local shard.
    state: the optimizer's state of the parameter: "step", 0-d, the number of updates so far; the rule's fields (`state_keys`)
        and, with compensation, "compensation", all of the parameter's shape; the scales of fields in 8 bits (`scale_key`);
        "mean_square", 0-d, and with random bits "microbatches", their number, only while micro-batches are in the fields.
    compensation: resolved, of `core.compensation`.
    settings: the current settings of the parameter's group.
    shard: the location of the local shard in the whole parameter; None if it is not sharded.
    capturable: "step" is on the parameter's device, and the host must not wait for it.
    random_key: of the tensor's random bits (`core.random_bits`); None where nothing is rounded stochastically.
    random: the numbers of what is rounded stochastically: 0 for the parameter, n for the nth field.
    coded: whether a field is kept in 8 bits.
    first_index: of the parameter's first element in the whole tensor, row by row; for the random bits alone.
    kind: class, dtype, device and shape of the parameter when the slot was made.
    plan: what a backend caches for this tensor. dataclasses.replace() does not copy it.
    compute_dtype: the dtype of the arithmetic.
    keys: of the rule's fields in the state.
    dtypes: of the fields.
    fields_of: returns the rule's fields in a state, as a tuple.
    step, step_address: "step" when the slot was made, and its address; 0 if it is not on a CPU.
    counter: `step`; on a CPU its memory as a numpy array, which reads and writes a number in a tenth of the time.
    """

    parameter: Tensor
    state: Any
    compensation: str
    rule: Rule
    settings: GroupSettings
    capturable: bool = False
    shard: Shard | None = None
    random_key: int | None = None
    random: tuple[int, ...] = ()
    first_index: int = 0
    kind: Any = dataclasses.field(default=None, repr=False)
    plan: Any = dataclasses.field(default=None, init=False, repr=False)
    compute_dtype: torch.dtype = dataclasses.field(init=False, repr=False)
    keys: tuple[str, ...] = dataclasses.field(init=False, repr=False)
    dtypes: StateDtypes = dataclasses.field(init=False, repr=False)
    coded: bool = dataclasses.field(init=False, repr=False)
    fields_of: Callable[[Any], tuple[Any, ...]] = dataclasses.field(init=False, repr=False)
    step: Tensor = dataclasses.field(init=False, repr=False)
    step_address: int = dataclasses.field(init=False, repr=False)
    counter: Any = dataclasses.field(init=False, repr=False)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The validated hyperparameters of the group; the same object until one of them changes."""
        return self.settings.hyperparameters

    def __post_init__(self) -> None:
        self.compute_dtype = DTYPES[compute_dtype(dtype_name(self.parameter.dtype))]
        self.keys = keys = state_keys(self.rule)
        self.dtypes = dtypes_in(keys, self.state)
        self.coded = EIGHT_BIT in self.dtypes
        # itemgetter takes a fifth of the time of a loop, and returns no tuple for one key
        plain = len(keys) > 1 and not self.coded
        self.fields_of = itemgetter(*keys) if plain else lambda state: tuple(_field(key, state) for key in keys)
        self.step = step = self.state["step"]
        on_host = type(step) is Tensor and step.device.type == "cpu"
        self.step_address, self.counter = (step.data_ptr(), step.numpy()) if on_host else (0, step)

    @property
    def corrections(self) -> Any:
        """`Rule.corrections` of this update: numbers, or 0-d tensors in the compute dtype when capturable."""
        if self.capturable:
            return self.rule.corrections(self.hyperparameters, self.step.to(self.compute_dtype) + 1, torch)
        return self.settings.corrections(self.step_number)

    @property
    def step_number(self) -> float:
        """Number t of the next update, starting at 1. Synchronises when capturable."""
        return self.counter.item() + 1

    def when(self, number: int) -> Any:
        """Return `core.random_bits.when` of this update: a number, or a 0-d tensor on the device when capturable.

        number: 0 for the parameter, n for the nth field.
        """
        update = self.step.to(torch.int64) + 1 if self.capturable else int(self.step_number)
        return random_bits.when(update, number, self.state.get("microbatches", 0) if number else 0)

    def keep_open(self, mean_square: Tensor | float) -> None:
        """Note that one more micro-batch of this update is in the fields."""
        self.state["mean_square"] = mean_square
        if self.random:
            self.state["microbatches"] = self.state.get("microbatches", 0) + 1

    def close(self) -> None:
        """Note that the fields contain whole updates only."""
        self.state.pop("mean_square", None)
        if self.random:
            self.state.pop("microbatches", None)

    def tensors(self, gradient: Tensor | None) -> dict[str, Tensor]:
        """Return parameter, gradient and what is kept of its rows by name, without those that are absent."""
        named = {"parameter": self.parameter, "gradient": gradient}
        scales = map(scale_key, self.keys) if self.coded else ()
        named |= {name: self.state.get(name) for name in (*self.keys, "compensation", *scales)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def numbers(self) -> UpdateNumbers:
        """Return the scalars of this update as 0-d tensors in the compute dtype."""
        if self.capturable:
            return numbers_of(self.hyperparameters, self.rule, self.corrections, self.compute_dtype)
        return self.settings.numbers(self.step_number, self.compute_dtype)

    def vector(self) -> Tensor:
        """Return `vector_of(numbers)` on the parameter's device."""
        device = self.parameter.device
        if self.capturable:
            return vector_of(self.hyperparameters, self.rule, self.numbers(), device)
        return self.settings.vector(self.step_number, self.compute_dtype, device)


def count_updates(slots: Iterable[TensorSlot]) -> None:
    """Add 1 to "step" of each slot."""
    for slot in slots:
        if slot.step_address:
            slot.counter[()] = slot.counter.item() + 1
        else:
            slot.counter.add_(_ONE)


class Backend(Protocol):
    """Updates parameters and state in place; does not wait for the device, and does not change the gradient.

    Every error that the host can detect for any tensor of a call is raised before the first tensor is written. An error during
    the updates (the device fails, or has no memory for scratch) may leave some tensors updated; none is counted in "step".
    """

    name: str
    one_launch: bool
    """Whether `update_all` of many small tensors costs the host about as much as `update` of one."""

    def update_all(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None, measure: bool = False
    ) -> Sequence[Tensor] | None:
        """Call `update` with first=True for many tensors at once.

        over_shards: given if the rule clips and the tensors are shards. It is called once, after every gradient was read and
            before anything is written; its result gives the learning rates.
        measure: return the sum of each gradient's squares, 0-d in the compute dtype, if this backend computes them anyway; else
            None. Not with `over_shards`.
        """
        ...

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """Add the gradient to the moments and take the step: `core.update.update`.

        measure: return the sum of the gradient's squares, 0-d in the compute dtype, if this backend computes it anyway; else
            None.
        """
        ...

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """Add the gradient to the moments, and put "mean_square" into the state: `core.update.accumulate`."""
        ...

    def apply(self, slot: TensorSlot) -> None:
        """Take the step from the moments, and remove "mean_square" from the state: `core.update.apply`."""
        ...


@runtime_checkable
class ChecksOnDevice(Protocol):
    """A backend that can skip updates with non-finite gradients without synchronising with the host.

    Each method returns float32 flags on the device, 0-d: 1 if the update was applied, 0 if it was skipped; "step" is to be
    increased by them. A tensor is written only after all gradients that decide about it were read.
    """

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> Tensor:
        """Update all tensors if all gradients are finite, otherwise none."""
        ...

    def update_each_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Tensor]:
        """Update each tensor whose own gradient is finite."""
        ...

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        """Call `Backend.update` with first=True if the gradient is finite."""
        ...
