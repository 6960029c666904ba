"""Groups the tensors of a call into batches that one launch can update.

Addresses, sizes in bytes, gradients and numbers of updates are read at every call, column by column, which takes half the
time of reading tensor by tensor. The grouping is cached in the slots and reused as long as none of these has changed: state
and parameters of the same slots with the same addresses and sizes in bytes also have the same devices and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.codings import EIGHT_BIT
from ....core.errors import InvalidArgumentError
from ...communication.shards import PLAIN
from ..backend import EXP_AVG, EXP_AVG_SQ, TensorSlot
from .coding import SCALES, check_scale, multiple_of_rows, place, positions, scales_of
from .operands import ACCESS_BYTES, NOTHING_KEPT, Operands, alignment, check_operands, operands

Columns = list[list[Any]]
"""A list for each field of `Operands`, with an element for each tensor; then, if any has moments in 8 bits, one for the scales
of each moment. The parameter takes the place of what a tensor has not. Neighbours without any of their own are one object."""

OPERANDS = len(Operands._fields)
PARAMETER = Operands._fields.index("parameter")

_bytes: Callable[[Tensor], int] = operator.attrgetter("nbytes")
_device: Callable[[Tensor], torch.device] = operator.attrgetter("device")
_dtype: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


class Plan:
    """The content of `TensorSlot.plan`: the grouping of the last call whose first slot was this one."""

    __slots__ = ("grouping",)

    def __init__(self) -> None:
        self.grouping: Grouping | None = None


class Facts(NamedTuple):
    """The properties that determine the grouping and may change from call to call, each as a list over the tensors.

    addresses: of state and parameters.
    bytes: of gradients, state and parameters.
    dtypes: of the gradients.
    counts: the position of the first tensor with the same number of updates.
    """

    addresses: Columns
    bytes: Columns
    dtypes: list[torch.dtype]
    counts: list[int]


@dataclasses.dataclass(slots=True)
class Grouping:
    """The grouping of a call. It refers to no tensor and no slot.

    plans: of the slots; every slot has its own, so equal plans mean equal slots.
    compensated, coded, random, capturable: whether any slot is compensated, has moments in 8 bits, is rounded stochastically,
        or is capturable.
    facts: of the last call; None if it was refused.
    gradients: addresses of the gradients at the last call; separate from the facts, because they may change at every call.
    devices, numels: of the parameters; numbers of elements as `coding.positions` counts them.
    places: three columns of `coding.Place`; empty if no slot is random.
    single: the positions of the tensors with one element.
    groups: the positions of the tensors of each group, and bytes that their addresses are multiples of.
    """

    plans: list[Plan]
    compensated: bool
    coded: bool
    random: bool
    capturable: bool
    facts: Facts | None = None
    gradients: list[int] = dataclasses.field(default_factory=list)
    devices: list[torch.device] = dataclasses.field(default_factory=list)
    numels: list[int] = dataclasses.field(default_factory=list)
    places: list[list[int]] = dataclasses.field(default_factory=list)
    single: list[int] = dataclasses.field(default_factory=list)
    groups: list[tuple[list[int], int]] = dataclasses.field(default_factory=list)


class Batch(NamedTuple):
    """Tensors that one launch can update; none is empty. Every list has an element for each tensor.

    slots, numels: the slots and their numbers of elements, as `coding.positions` counts them.
    operands, addresses: the tensors and their addresses.
    steps: addresses of t; 0 if the kernels do not read it.
    alignment: bytes that all addresses are multiples of.
    coding: the addresses of the scales of both moments, and the columns of `coding.Place`; empty if nothing is random.
    """

    slots: list[TensorSlot]
    operands: Columns
    addresses: Columns
    steps: list[int]
    numels: list[int]
    alignment: int
    coding: list[list[int]]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters to update."""
        return self.operands[PARAMETER]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.parameters[0].device

    def rows(self, chosen: list[int], aligned: int) -> Batch:
        """Return the batch of the tensors at the positions `chosen`, whose addresses are multiples of `aligned` bytes."""
        if len(chosen) == len(self.slots):
            return self._replace(alignment=aligned)

        def of(column: list[Any]) -> list[Any]:
            return [column[row] for row in chosen]

        columns = list(map(of, self.operands)), list(map(of, self.addresses))
        coding = list(map(of, self.coding)) if self.slots[chosen[0]].random else []
        return Batch(of(self.slots), *columns, of(self.steps), of(self.numels), aligned, coding)


def batches_of(pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Batch]:
    """Return the tensors of a call in as few batches as possible.

    Raises:
        UnsupportedTensorError: a parameter is not dense, or its tensors differ in device or size.
        InvalidArgumentError: a number of updates is not on the parameter's device, although the slot is capturable.
    """
    if not pairs:
        return []
    slots = [slot for slot, _ in pairs]
    known, states = _known(slots), [slot.state for slot in slots]
    columns = _columns(known, slots, states, [gradient for _, gradient in pairs])
    addresses, facts = _read(slots, columns)
    if facts != known.facts or not _in_order(columns, known.single) or not _still(known, columns[0], addresses[0]):
        if not _all_in_order(columns):
            columns = _in_parameter_layout(known, slots, columns[0])
            addresses, facts = _read(slots, columns)
        _group(known, slots, columns, addresses, facts)
    on_device = _step_addresses(slots, known.devices) if known.capturable else [0] * len(slots)
    assert known.facts is not None
    addresses = [known.gradients, *known.facts.addresses]  # the same objects at each call, which makes comparing them fast
    coding: list[list[int]] = []
    if known.random:
        scales = addresses[OPERANDS:] or [[0] * len(slots)] * len(SCALES)
        coding, columns, addresses = [*scales, *known.places], columns[:OPERANDS], addresses[:OPERANDS]
    whole = Batch(slots, columns, addresses, on_device, known.numels, ACCESS_BYTES, coding)
    return [whole.rows(chosen, aligned) for chosen, aligned in known.groups]


def _known(slots: list[TensorSlot]) -> Grouping:
    """Return the cached grouping of these slots, or a new one."""
    plans = [slot.plan or _new_plan(slot) for slot in slots]
    known = plans[0].grouping
    if known is None or known.plans != plans:
        compensated = any(slot.compensation not in NOTHING_KEPT for slot in slots)
        coded, random = any(slot.coded for slot in slots), any(slot.random for slot in slots)
        known = plans[0].grouping = Grouping(plans, compensated, coded, random, any(slot.capturable for slot in slots))
    return known


def _new_plan(slot: TensorSlot) -> Plan:
    slot.plan = Plan()
    return slot.plan


def _columns(known: Grouping, slots: list[TensorSlot], states: list[Any], gradients: list[Tensor]) -> Columns:
    """Return the tensors without checking or copying any."""
    parameters = [slot.parameter for slot in slots]
    columns = [gradients, [state[EXP_AVG] for state in states], [state[EXP_AVG_SQ] for state in states], parameters]
    if not known.compensated:
        columns.append(parameters)
    else:
        rows = zip(slots, states, parameters, strict=True)
        columns.append([p if slot.compensation in NOTHING_KEPT else state["compensation"] for slot, state, p in rows])
    return [*columns, *_scales(states, parameters)] if known.coded else columns


def _scales(states: list[Any], parameters: list[Tensor]) -> Columns:
    """Return the scales of both moments, with the parameter in place of those that a tensor has not."""
    rows = list(zip(states, parameters, strict=True))
    return [[parameter if (scale := state.get(key)) is None else scale for state, parameter in rows] for key in SCALES]


def _read(slots: list[TensorSlot], columns: Columns) -> tuple[Columns, Facts]:
    """Return all addresses, and the facts."""
    addresses = _of_each(Tensor.data_ptr, columns)
    counts = _first_equal([None if slot.capturable else slot.counter.item() for slot in slots])
    return addresses, Facts(addresses[1:], _of_each(_bytes, columns), list(map(_dtype, columns[0])), counts)


def _of_each(read: Callable[[Tensor], Any], columns: Columns) -> Columns:
    """Return `read(tensor)` for each tensor; reads parameters only once if they are the column of compensations, too."""
    found: Columns = []
    for number, column in enumerate(columns):
        found.append(found[-1] if number and column is columns[number - 1] else list(map(read, column)))
    return found


def _first_equal(values: Sequence[Hashable]) -> list[int]:
    """Return for each value the position of the first equal one."""
    if values.count(values[0]) == len(values):
        return [0] * len(values)
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, position) for position, value in enumerate(values)]


def _in_order(columns: Columns, single: Iterable[int]) -> bool:
    """Whether parameters and gradients are contiguous, and no gradient has the negative bit, which kernels do not see.

    Only the imaginary part of a conjugate has that bit. Its stride is 2, so it is contiguous only if it has one element.

    Args:
        columns: the tensors.
        single: the positions of the tensors with one element.
    """
    gradients, parameters = columns[0], columns[PARAMETER]
    if not (all(map(Tensor.is_contiguous, gradients)) and all(map(Tensor.is_contiguous, parameters))):
        return False
    return not any(gradients[position].is_neg() for position in single)


def _still(known: Grouping, gradients: list[Tensor], addresses: list[int]) -> bool:
    """Whether the gradients have the devices and alignments of the last call's; equal addresses mean equal devices."""
    if known.gradients == addresses:
        return True
    aligned = [address % ACCESS_BYTES for address in addresses] == [address % ACCESS_BYTES for address in known.gradients]
    known.gradients = addresses
    return aligned and list(map(_device, gradients)) == known.devices


def _all_in_order(columns: Columns) -> bool:
    """Whether all tensors are contiguous, no gradient has the negative bit, and the parameters are of plain types."""
    if not all(type(parameter) in PLAIN for parameter in columns[PARAMETER]) or any(map(Tensor.is_neg, columns[0])):
        return False
    return all(all(map(Tensor.is_contiguous, column)) for column in columns)


def _in_parameter_layout(known: Grouping, slots: list[TensorSlot], gradients: list[Tensor]) -> Columns:
    """Return the tensors in the memory layouts of their parameters."""
    found = [list(column) for column in zip(*map(operands, slots, gradients), strict=True)]
    if not known.compensated:
        found[-1] = found[PARAMETER]
    if not known.coded:
        return found
    for slot in slots:
        scales_of(slot)  # makes them contiguous
    return [*found, *_scales([slot.state for slot in slots], found[PARAMETER])]


def _group(known: Grouping, slots: list[TensorSlot], columns: Columns, addresses: Columns, facts: Facts) -> None:
    """Check all tensors, and set the cached grouping."""
    known.facts = None
    devices, numels = list(map(_device, columns[PARAMETER])), list(map(Tensor.numel, columns[PARAMETER]))
    tensors, addresses = columns[:OPERANDS], addresses[:OPERANDS]
    for column in tensors:
        if list(map(_device, column)) != devices or list(map(Tensor.numel, column)) != numels:
            for row in zip(*tensors, strict=True):
                check_operands(Operands(*row))
    for number, column in enumerate(columns[OPERANDS:]):
        for slot, scale in zip(slots, column, strict=True):
            if slot.dtypes[number] == EIGHT_BIT:
                check_scale(slot, SCALES[number], scale)
    if functools.reduce(operator.or_, itertools.chain(*addresses)) % ACCESS_BYTES == 0:
        alignments = [ACCESS_BYTES] * len(slots)
    else:
        alignments = list(map(alignment, zip(*tensors, strict=True), zip(*addresses, strict=True)))
    dtypes = [list(map(_dtype, column)) for column in tensors]
    settings = [(id(slot.settings), slot.rule, slot.compensation, slot.random, multiple_of_rows(slot)) for slot in slots]
    keys = zip(settings, facts.counts, devices, alignments, *dtypes, strict=True)
    alike: dict[tuple[Hashable, ...], list[int]] = {}
    for number, (numel, key) in enumerate(zip(numels, keys, strict=True)):
        if numel > 0:  # a shard may be empty where its parameter is not
            alike.setdefault(key, []).append(number)
    if known.random:
        known.places = [list(column) for column in zip(*map(place, slots), strict=True)]
        numels = list(map(positions, slots))
    known.facts, known.gradients, known.devices, known.numels = facts, addresses[0], devices, numels
    known.single = [number for number, numel in enumerate(numels) if numel == 1]
    known.groups = [(rows, alignments[rows[0]]) for rows in alike.values()]


def _step_addresses(slots: list[TensorSlot], devices: list[torch.device]) -> list[int]:
    pairs = zip(slots, devices, strict=True)
    return [step_count_on(device, slot.step).data_ptr() if slot.capturable else 0 for slot, device in pairs]


def step_count_on(device: torch.device, step: Tensor) -> Tensor:
    """Return the number of updates after checking that it is on this device, where the kernels read it.

    Raises:
        InvalidArgumentError: it is on another device.
    """
    if step.device != device:
        raise InvalidArgumentError(
            f"capturable=True needs the step counts on {device}, and one is on {step.device}: it was set after the first step. "
            "Construct the optimizer with capturable=True and load its state_dict()."
        )
    return step
