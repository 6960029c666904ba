"""The Triton backend: `Backend` by the kernels of `kernels`, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.errors import RefusedError
from ..backend import OverShards, TensorSlot
from . import devices
from .batches import Batch, alike, step_on
from .configuration import Device, configuration, wave_elements
from .launch import Launch, launch_all
from .memory import Scratches
from .numbers import KnownNumbers
from .operands import Operands, alignment, check_operands, operands
from .specialisation import WIDE_DTYPES, Kind, Programs, specialisation
from .tables import GroupTables


class MeasureThenWrite(NamedTuple):
    """Two launches: the first writes nothing but `squares`, the mean squares, and the second one writes the tensors."""

    batch: Batch
    squares: Tensor
    measure: Launch
    write: Launch


class TritonBackend:
    """`Backend` and `ChecksOnDevice`, by Triton kernels.

    update_all() is one launch for each parameter group (more where dtypes, devices or step counts differ within it). Under
    release a large tensor is one launch, and small ones, which a launch costs more than their update, wait for each other.
    Every launch of a call is made ready, memory, tables, numbers and program, before the first one writes.

    Triton's own front end, which takes most of the host's time of a launch, runs once a program: programs are looked up by
    their `Specialisation`. Addresses and sizes are read at every launch.
    """

    name = "triton"
    one_launch = True

    def __init__(self) -> None:
        self._scratch = Scratches()
        self._tables = GroupTables()
        self._numbers = KnownNumbers()
        self._programs = Programs()

    # -- many tensors ---------------------------------------------------------------------------------------------------

    def update_all(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None) -> None:
        """With `over_shards` there are two launches for one."""
        batches = alike(pairs)
        if over_shards is None:
            launch_all([self._together(batch) for batch in batches])
            return
        launches = [self._in_two(batch, None) for batch in batches]
        launch_all([one.measure for one in launches])
        here = {
            id(slot): square for one in launches for slot, square in zip(one.batch.slots, one.squares.unbind(), strict=True)
        }
        for slot, _ in pairs:
            if id(slot) not in here:  # empty: it adds nothing
                here[id(slot)] = torch.zeros((), dtype=WIDE_DTYPES[slot.parameter.dtype], device=slot.parameter.device)
        whole = over_shards([here[id(slot)] for slot, _ in pairs])
        there = {id(slot): square for (slot, _), square in zip(pairs, whole, strict=True)}
        for one in launches:
            one.squares.copy_(torch.stack([there[id(slot)] for slot in one.batch.slots]))
        launch_all([one.write for one in launches])

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> Tensor:
        """Everything is measured before anything is written: two launches instead of one."""
        on = {slot.parameter.device for slot, _ in pairs}
        flags = {device: torch.ones((), dtype=torch.float32, device=device) for device in on}
        launches = [self._in_two(batch, flags[batch.device]) for batch in alike(pairs)]
        launch_all([one.measure for one in launches])
        applied = _combined(flags)
        launch_all([one.write for one in launches])
        return applied

    def update_each_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Tensor]:
        """Of several alike two launches, of one by itself one."""
        if len(pairs) == 1:
            return [self.update_if_finite(*pairs[0])]
        applied: dict[int, Tensor] = {}
        launches = []
        for batch in alike(pairs):
            flags = torch.ones(len(batch.slots), dtype=torch.float32, device=batch.device)
            launches.append(self._in_two(batch, flags, each=True))
            applied |= zip(map(id, batch.slots), flags.unbind(), strict=True)
        launch_all([one.measure for one in launches])
        launch_all([one.write for one in launches])
        return [
            applied[id(slot)] if id(slot) in applied else torch.ones((), device=slot.parameter.device)  # empty: nothing to do
            for slot, _ in pairs
        ]

    def _together(self, batch: Batch) -> Launch:
        """One launch that measures, if the rule clips, and writes."""
        phases = "both" if batch.slots[0].rule.clips_update else "write"
        return self._ready(batch, phases, _squares(batch), None)

    def _in_two(self, batch: Batch, applied: Tensor | None, *, each: bool = False) -> MeasureThenWrite:
        squares = _squares(batch)
        measure = self._ready(batch, "measure", squares, applied, each=each)
        return MeasureThenWrite(batch, squares, measure, self._ready(batch, "write", squares, applied, each=each))

    def _ready(self, batch: Batch, phases: str, squares: Tensor, applied: Tensor | None, *, each: bool = False) -> Launch:
        """A launch of `kernels.update_group`, whose arguments these are."""
        slot, device, count = batch.slots[0], batch.device, len(batch.slots)
        lead = Operands(*(column[0] for column in batch.operands))
        wide = squares.dtype
        with devices.on(device):
            captured = _captured(slot, device)
            chosen, properties = configuration(device, lead.parameter.dtype), Device.of(device)
            tables = self._tables(
                [*batch.addresses, batch.steps],
                batch.numels,
                chosen.item,
                wave_elements(chosen, properties, lead.gradient.element_size() + lead.exp_avg_sq.element_size()),
                phases,
                device,
                capturable=slot.capturable,
            )
            scratch = self._scratch(device, captured)
            partials, counters = scratch.partials(tables.slot_count, wide), scratch.counters(2 + 2 * count)
            fixed, buffer, numbers = self._numbers(slot, wide, device, scratch)
        programs = tables.ticket_count
        if phases == "both":
            programs = min(programs, properties.multiprocessors * chosen.programs)
        kind: Kind = ("update_group", (("PHASES", phases), ("EACH", each), ("STEP_ON_DEVICE", slot.capturable)))
        pointers = tables.items, tables.tensors, partials, squares, counters, applied, buffer
        program = self._programs(kind, specialisation(slot, device, chosen, fixed, lead, batch.alignment, pointers))
        sizes = tables.ticket_count, count
        arguments = tables.items, tables.tensors, partials, squares, counters, *sizes, applied, buffer, *numbers
        return Launch(program, device, programs, arguments, [] if phases == "measure" else batch.parameters)

    # -- one tensor -----------------------------------------------------------------------------------------------------

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> None:
        """The sum of the gradient's squares is not at hand."""
        self._launch_tensor(slot, gradient, "update", first)
        slot.state.pop("mean_square", None)

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        applied = torch.ones((), dtype=torch.float32, device=gradient.device)
        self._launch_tensor(slot, gradient, "update", True, applied)
        return applied

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        slot.state["mean_square"] = self._launch_tensor(slot, gradient, "accumulate", first)

    def apply(self, slot: TensorSlot) -> None:
        self._launch_tensor(slot, None, "apply", False)
        slot.state.pop("mean_square")

    def _launch_tensor(
        self, slot: TensorSlot, gradient: Tensor | None, action: str, first: bool, applied: Tensor | None = None
    ) -> Tensor | float:
        """One launch; the summed mean square where the rule clips."""
        given = operands(slot, gradient)
        check_operands(given)
        device, n, clips = given.parameter.device, given.parameter.numel(), slot.rule.clips_update
        wide = WIDE_DTYPES[given.parameter.dtype]
        before = slot.state["mean_square"] if clips and not first else None
        if n == 0:
            return 0.0 if not clips else torch.zeros((), dtype=wide, device=device) if before is None else before
        addresses = [tensor.data_ptr() for tensor in given]
        with devices.on(device):
            captured = _captured(slot, device)
            chosen = configuration(device, given.parameter.dtype)
            count = -(-n // chosen.item)
            scratch = self._scratch(device, captured)
            if before is not None and not isinstance(before, Tensor):
                before = torch.full((), before, dtype=wide, device=device)
            after = torch.empty((), dtype=wide, device=device) if action == "accumulate" else scratch.square(wide)
            step = step_on(device, slot.state["step"]) if slot.capturable and action != "apply" else None
            partials, counters = scratch.partials(count, wide), scratch.counters(4)
            fixed, buffer, numbers = self._numbers(slot, wide, device, scratch)
            pointers = step, partials, counters, before, after, applied, buffer
            kind: Kind = ("update_tensor", (("ACTION", action), ("FIRST", first)))
            aligned = alignment(given, addresses)
            program = self._programs(kind, specialisation(slot, device, chosen, fixed, given, aligned, pointers))
            programs = count
            if action == "update" and (clips or applied is not None):  # measures and writes
                programs = min(2 * count, Device.of(device).multiprocessors * chosen.programs)
            arguments = *addresses, n, count, *pointers, *numbers
            launch = Launch(program, device, programs, arguments, [] if action == "accumulate" else [given.parameter])
            launch.load()
            launch()
        return after if clips else 0.0


def _squares(batch: Batch) -> Tensor:
    """Room for a mean square of each."""
    return torch.empty(len(batch.slots), dtype=WIDE_DTYPES[batch.parameters[0].dtype], device=batch.device)


def _captured(slot: TensorSlot, device: torch.device) -> bool:
    """Whether launches are being captured. A graph would repeat for ever the number of updates that the host knows then."""
    captured = devices.capturing(device)
    if captured and not slot.capturable:
        raise RefusedError(
            "a step can be captured in a CUDA graph only where the number of updates is kept on the device; construct the "
            "optimizer with capturable=True."
        )
    return captured


def _combined(flags: dict[torch.device, Tensor]) -> Tensor:
    """The product of the flags of all devices, put back into each of them."""
    first, *others = flags.values()
    for other in others:
        first.mul_(other.to(first.device, non_blocking=True))
    for other in others:
        other.copy_(first, non_blocking=True)
    return first
