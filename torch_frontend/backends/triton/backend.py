"""The Triton backend: prepares and makes the launches of the kernels, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import RefusedError
from ..backend import OverShards, TensorSlot
from . import devices
from .batches import Batch, batches_of, step_count_on
from .coding import arguments_of, multiple_of_rows, positions, update_number
from .configuration import Device, configuration, wave_elements
from .corrections import AT_ONCE
from .launch import Launch, launch_all
from .memory import ScratchByStream
from .numbers import NumbersCache
from .operands import Operands, alignment, check_operands, operands
from .specialisation import COMPUTE_DTYPES, CorrectionsOf, Kind, ProgramCache, seen, specialisation
from .tables import GroupTables


class Factors(NamedTuple):
    """Memory for what launches compute of each tensor of a batch and their later programs or launches read.

    squares: [tensors], the mean squares.
    corrections: [tensors, 2], c1 and c2; None if the host knows them.
    norms: [tensors], the sums of the gradients' squares; None if nobody asks for them.
    """

    squares: Tensor
    corrections: Tensor | None
    norms: Tensor | None


class MeasureThenWrite(NamedTuple):
    """Launches of a batch in two steps: `measure` writes only factors, of which it has these `squares`; `write` updates."""

    batch: Batch
    squares: Tensor
    measure: list[Launch]
    write: Launch


class TritonBackend:
    """Implements `Backend` and `ChecksOnDevice` with Triton kernels.

    update_all() makes one launch for each parameter group (more if dtypes, devices or step counts differ within it), and a
    small one before it if step counts are on the device. Under release, a large tensor is one launch; small ones are queued and
    updated together, because a launch costs more than their update. All launches of a call are prepared (memory, tables,
    scalars and program) before the first one writes.

    Triton's own front end, which takes most of the host time of a launch, runs once per program: compiled programs are looked
    up by their `Specialisation`. Addresses and sizes are read at every launch.
    """

    name = "triton"
    one_launch = True

    def __init__(self) -> None:
        self._scratch = ScratchByStream()
        self._tables = GroupTables()
        self._numbers = NumbersCache()
        self._programs = ProgramCache()

    # -- many tensors ---------------------------------------------------------------------------------------------------

    def update_all(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, over_shards: OverShards | None = None, measure: bool = False
    ) -> Sequence[Tensor] | None:
        """Update all tensors, with one launch for each batch; with two if `over_shards` is given, or without tickets."""
        batches = batches_of(pairs)
        if over_shards is None:
            factors = [_factors(batch, measure) for batch in batches]
            launch_all([launch for batch, its in zip(batches, factors, strict=True) for launch in self._launches(batch, its)])
            return _in_order(pairs, batches, [its.norms for its in factors]) if measure else None
        launches = [self._two_launches(batch, None) for batch in batches]
        launch_all([launch for one in launches for launch in one.measure])
        local = {
            id(slot): square for one in launches for slot, square in zip(one.batch.slots, one.squares.unbind(), strict=True)
        }
        for slot, _ in pairs:
            if id(slot) not in local:  # an empty shard
                local[id(slot)] = torch.zeros((), dtype=COMPUTE_DTYPES[slot.parameter.dtype], device=slot.parameter.device)
        whole = over_shards([local[id(slot)] for slot, _ in pairs])
        totals = {id(slot): square for (slot, _), square in zip(pairs, whole, strict=True)}
        for one in launches:
            one.squares.copy_(torch.stack([totals[id(slot)] for slot in one.batch.slots]))
        launch_all([one.write for one in launches])
        return None

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> Tensor:
        """Measure every tensor in a first launch for each batch, then write all or none in a second."""
        on = {slot.parameter.device for slot, _ in pairs}
        flags = {device: torch.ones((), dtype=torch.float32, device=device) for device in on}
        launches = [self._two_launches(batch, flags[batch.device]) for batch in batches_of(pairs)]
        launch_all([launch for one in launches for launch in one.measure])
        applied = _combined(flags)
        launch_all([one.write for one in launches])
        return applied

    def update_each_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Tensor]:
        """Measure and write each batch in two launches; a single tensor in one."""
        if len(pairs) == 1:
            return [self.update_if_finite(*pairs[0])]
        applied: dict[int, Tensor] = {}
        launches = []
        for batch in batches_of(pairs):
            flags = torch.ones(len(batch.slots), dtype=torch.float32, device=batch.device)
            launches.append(self._two_launches(batch, flags, each=True))
            applied |= zip(map(id, batch.slots), flags.unbind(), strict=True)
        launch_all([launch for one in launches for launch in one.measure])
        launch_all([one.write for one in launches])
        return [
            applied[id(slot)] if id(slot) in applied else torch.ones((), device=slot.parameter.device)  # an empty shard
            for slot, _ in pairs
        ]

    def _launches(self, batch: Batch, factors: Factors) -> list[Launch]:
        """Prepare one launch that measures, if the rule clips, and writes; a pair if the configuration has no tickets."""
        clips = batch.slots[0].rule.clips_update
        if clips and not configuration(batch.device, batch.parameters[0].dtype).tickets:
            pair = self._two_launches(batch, None, factors)
            return [*pair.measure, pair.write]
        return self._prepare(batch, "both" if clips else "write", factors, None)

    def _two_launches(
        self, batch: Batch, applied: Tensor | None, factors: Factors | None = None, *, each: bool = False
    ) -> MeasureThenWrite:
        factors = factors or _factors(batch)
        measure = self._prepare(batch, "measure", factors, applied, each=each)
        *_, write = self._prepare(batch, "write", factors, applied, each=each)
        return MeasureThenWrite(batch, factors.squares, measure, write)

    def _prepare(
        self, batch: Batch, phases: str, factors: Factors, applied: Tensor | None, *, each: bool = False
    ) -> list[Launch]:
        """Prepare a launch of `kernels.update_group`, and one before it of what corrects biases if the device does.

        For `phases`, `factors`, `applied` and `each` see there.
        """
        slot, device, count = batch.slots[0], batch.device, len(batch.slots)
        lead = Operands(*(column[0] for column in batch.operands))
        dtype = factors.squares.dtype
        with devices.on(device):
            captured = _captured(slot, device)
            sums = 0 if factors.norms is None else 1 + slot.rule.clips_update
            rows = multiple_of_rows(slot)
            chosen = configuration(device, lead.parameter.dtype, sums=sums, random=bool(slot.random), rows=rows)
            properties = Device.of(device)
            tables = self._tables(
                [*batch.addresses, batch.steps],
                batch.numels,
                chosen.item,
                wave_elements(chosen, properties, lead.gradient.element_size() + lead.exp_avg_sq.element_size()),
                phases,
                device,
                capturable=slot.capturable,
                coding=batch.coding,
            )
            scratch = self._scratch(device, captured)
            slots = tables.slot_count if factors.norms is None else 2 * tables.slot_count
            partials, counters = scratch.partials(slots, dtype), scratch.counters(2 + 2 * count)
            fixed, buffer, numbers = self._numbers(slot, dtype, device, scratch)
        resident = chosen.programs if phases == "both" else None
        kind: Kind = ("update_group", (("PHASES", phases), ("EACH", each)))
        pointers = tables.items, tables.tensors, partials, *factors, counters, applied, buffer
        program = self._programs(kind, specialisation(slot, device, chosen, fixed, lead, batch.alignment, pointers))
        sizes = tables.ticket_count, count
        arguments = tables.items, tables.tensors, partials, *factors, counters, *sizes, applied, buffer, *numbers
        if slot.random:
            arguments = *arguments, update_number(slot)
        written = [] if phases == "measure" else batch.parameters
        launch = Launch(program, device, tables.ticket_count, resident, arguments, written)
        if factors.corrections is None:
            return [launch]
        given = tables.tensors, factors.corrections
        wanted = CorrectionsOf(device, tables.tensors.shape[1], dtype, seen([*given, buffer]))
        before = self._programs(("store_bias_corrections", ()), wanted)
        return [Launch(before, device, -(-count // AT_ONCE.value), None, (*given, count, buffer, *numbers[:4]), []), launch]

    # -- one tensor -----------------------------------------------------------------------------------------------------

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, measure: bool = False) -> Tensor | None:
        """Update one tensor in one launch, which also sums the gradient's squares on request."""
        norm = torch.empty((), dtype=slot.compute_dtype, device=gradient.device) if measure else None
        self._launch_tensor(slot, gradient, "update", first, norm=norm)
        if slot.random:
            slot.close()
        else:
            slot.state.pop("mean_square", None)
        return norm

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        applied = torch.ones((), dtype=torch.float32, device=gradient.device)
        self._launch_tensor(slot, gradient, "update", True, applied)
        return applied

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        slot.keep_open(self._launch_tensor(slot, gradient, "accumulate", first))

    def apply(self, slot: TensorSlot) -> None:
        self._launch_tensor(slot, None, "apply", False)
        slot.close()

    def _launch_tensor(
        self,
        slot: TensorSlot,
        gradient: Tensor | None,
        action: str,
        first: bool,
        applied: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> Tensor | float:
        """Launch `kernels.update_tensor`; return the summed mean square, or 0.0 if the rule does not clip."""
        given = operands(slot, gradient)
        check_operands(given)
        device, n, clips = given.parameter.device, given.parameter.numel(), slot.rule.clips_update
        dtype = COMPUTE_DTYPES[given.parameter.dtype]
        before = slot.state["mean_square"] if clips and not first else None
        if n == 0:
            if norm is not None:
                norm.zero_()
            return 0.0 if not clips else torch.zeros((), dtype=dtype, device=device) if before is None else before
        addresses = [tensor.data_ptr() for tensor in given]
        with devices.on(device):
            captured = _captured(slot, device)
            sums = 0 if norm is None else 1 + clips
            coding: tuple[Any, ...] = ()
            if slot.random:
                chosen = configuration(device, given.parameter.dtype, sums=sums, random=True, rows=multiple_of_rows(slot))
                n, coding = positions(slot), arguments_of(slot)
            else:
                chosen = configuration(device, given.parameter.dtype, sums=sums)
            count = -(-n // chosen.item)
            scratch = self._scratch(device, captured)
            if before is not None and not isinstance(before, Tensor):
                before = torch.full((), before, dtype=dtype, device=device)
            after = torch.empty((), dtype=dtype, device=device) if action == "accumulate" else scratch.square(dtype)
            needs_step = slot.capturable and (action != "apply" or slot.random)
            step = step_count_on(device, slot.step) if needs_step else None
            partials, counters = scratch.partials(count if norm is None else 2 * count, dtype), scratch.counters(4)
            fixed, buffer, numbers = self._numbers(slot, dtype, device, scratch)
            pointers = step, partials, counters, before, after, norm, applied, buffer
            kind: Kind = ("update_tensor", (("ACTION", action), ("FIRST", first)))
            aligned = alignment(given, addresses)
            tensors = (*pointers, *coding[:2])  # the scales
            program = self._programs(kind, specialisation(slot, device, chosen, fixed, given, aligned, tensors))
            programs, resident = count, None
            if action == "update" and (clips or applied is not None):  # measures and writes
                programs, resident = 2 * count, chosen.programs
            arguments = *addresses, n, count, *pointers, *numbers, *coding
            written = [] if action == "accumulate" else [given.parameter]
            launch = Launch(program, device, programs, resident, arguments, written)
            launch.load()
            launch()
        return after if clips else 0.0


def _factors(batch: Batch, measure: bool = False) -> Factors:
    """Allocate the factors of a batch. measure: with norms."""
    count, dtype = len(batch.slots), COMPUTE_DTYPES[batch.parameters[0].dtype]
    corrections = torch.empty(count, 2, dtype=dtype, device=batch.device) if batch.slots[0].capturable else None
    norms = torch.empty(count, dtype=dtype, device=batch.device) if measure else None
    return Factors(torch.empty(count, dtype=dtype, device=batch.device), corrections, norms)


def _in_order(
    pairs: Sequence[tuple[TensorSlot, Tensor]], batches: Sequence[Batch], norms: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the sum of each gradient's squares, 0-d, in the order of `pairs`; an empty one has the sum 0."""
    found: dict[int, Tensor] = {}
    for batch, its in zip(batches, norms, strict=True):
        assert its is not None
        found |= zip(map(id, batch.slots), its.unbind(), strict=True)
    return [
        found[id(slot)] if id(slot) in found else torch.zeros((), dtype=slot.compute_dtype, device=slot.parameter.device)
        for slot, _ in pairs
    ]


def _captured(slot: TensorSlot, device: torch.device) -> bool:
    """Whether launches are being captured in a CUDA graph.

    Raises:
        RefusedError: the number of updates is on the host: every replay of the graph would use the same number.
    """
    captured = devices.capturing(device)
    if captured and not slot.capturable:
        raise RefusedError(
            "a step can be captured in a CUDA graph only if the number of updates is on the device; construct the optimizer "
            "with capturable=True."
        )
    return captured


def _combined(flags: dict[torch.device, Tensor]) -> Tensor:
    """Set the flag of every device to the product of all flags, and return one of them."""
    first, *others = flags.values()
    for other in others:
        first.mul_(other.to(first.device, non_blocking=True))
    for other in others:
        other.copy_(first, non_blocking=True)
    return first
