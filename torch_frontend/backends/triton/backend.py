"""The Triton backend: `Backend` by the kernels of `kernels`, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....core.dtypes import compute_dtype
from ....core.errors import InvalidArgument, Refused
from ....core.moments import is_zero
from ...array_ops import DTYPES, dtype_name
from ..backend import OverShards, TensorSlot
from . import kernels, work
from .configuration import Configuration, Device, configuration, wave_elements
from .launch import Launch, Launcher, on
from .memory import Operands, Scratches, alignment, capturing, check_device, operands
from .numbers import numbers_of
from .tables import GroupTables

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
}
Key = tuple[Any, ...]


class Job(NamedTuple):
    """One tensor to update in a launch for many.

    slot, operands: what is updated.
    addresses: of the operands, in their order, and of t where the kernels read it, else 0.
    numel: elements.
    """

    slot: TensorSlot
    operands: Operands
    addresses: list[int]
    numel: int


class Apart(NamedTuple):
    """One launch that measures, writing nothing but `squares`, the mean squares, and one that writes."""

    jobs: Sequence[Job]
    squares: Tensor
    measure: Launch
    write: Launch


class TritonBackend:
    """See `Backend`, and `ChecksOnDevice`.

    update_all() is one launch for each parameter group (more where dtypes, devices or step counts differ within it). Under
    release a large tensor is one launch, and small ones, which a launch costs more than their update, wait for each other.
    Every launch of a call is made ready, memory, tables, numbers and program, before the first one writes.
    """

    name = "triton"
    one_launch = True

    def __init__(self) -> None:
        self._scratch = Scratches()
        self._tables = GroupTables()
        self._launch = Launcher()

    # -- many tensors ---------------------------------------------------------------------------------------------------

    def update_all(
        self,
        pairs: Sequence[tuple[TensorSlot, Tensor]],
        *,
        over_shards: OverShards | None = None,
    ) -> None:
        """See `Backend`. With `over_shards` there are two launches for one."""
        groups = _alike(pairs)
        if over_shards is None:
            self._launch([self._together(jobs) for jobs in groups])
            return
        apart = [self._apart(jobs, None) for jobs in groups]
        self._launch([one.measure for one in apart])
        here = {id(job.slot): square for one in apart for job, square in zip(one.jobs, one.squares.unbind(), strict=True)}
        for slot, _ in pairs:
            if id(slot) not in here:  # empty: it adds nothing
                here[id(slot)] = torch.zeros((), dtype=_wide(slot.parameter), device=slot.parameter.device)
        whole = over_shards([here[id(slot)] for slot, _ in pairs])
        there = {id(slot): square for (slot, _), square in zip(pairs, whole, strict=True)}
        for one in apart:
            one.squares.copy_(torch.stack([there[id(job.slot)] for job in one.jobs]))
        self._launch([one.write for one in apart])

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> Tensor:
        """See `ChecksOnDevice`. Everything is measured before anything is written: two launches instead of one."""
        devices = {slot.parameter.device for slot, _ in pairs}
        flags = {device: torch.ones((), dtype=torch.float32, device=device) for device in devices}
        apart = [self._apart(jobs, flags[_device(jobs)]) for jobs in _alike(pairs)]
        self._launch([one.measure for one in apart])
        applied = _combined(flags)
        self._launch([one.write for one in apart])
        return applied

    def update_each_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[Tensor]:
        """See `ChecksOnDevice`. Of several alike two launches, of one by itself one."""
        if len(pairs) == 1:
            return [self.update_if_finite(*pairs[0])]
        applied: dict[int, Tensor] = {}
        apart = []
        for jobs in _alike(pairs):
            flags = torch.ones(len(jobs), dtype=torch.float32, device=_device(jobs))
            apart.append(self._apart(jobs, flags, each=True))
            applied |= zip((id(job.slot) for job in jobs), flags.unbind(), strict=True)
        self._launch([one.measure for one in apart])
        self._launch([one.write for one in apart])
        return [
            applied[id(slot)] if id(slot) in applied else torch.ones((), device=slot.parameter.device)  # empty: nothing to do
            for slot, _ in pairs
        ]

    def _together(self, jobs: Sequence[Job]) -> Launch:
        """One launch that measures, if the rule clips, and writes."""
        phases = "both" if jobs[0].slot.rule.clips_update else "write"
        return self._ready(jobs, phases, _squares(jobs), None)

    def _apart(self, jobs: Sequence[Job], applied: Tensor | None, *, each: bool = False) -> Apart:
        squares = _squares(jobs)
        measure = self._ready(jobs, "measure", squares, applied, each=each)
        return Apart(jobs, squares, measure, self._ready(jobs, "write", squares, applied, each=each))

    def _ready(
        self,
        jobs: Sequence[Job],
        phases: str,
        squares: Tensor,
        applied: Tensor | None,
        *,
        each: bool = False,
    ) -> Launch:
        """A launch of `kernels.update_group`, whose arguments these are."""
        slot, lead, lead_addresses, _ = jobs[0]
        assert lead.gradient is not None
        device, wide = lead.parameter.device, _wide(lead.parameter)
        measured_bytes = lead.gradient.element_size() + lead.exp_avg_sq.element_size()
        with on(device):
            _check_capture(slot, device)
            chosen, properties = configuration(device, lead.parameter.dtype), Device.of(device)
            elements = wave_elements(chosen, properties, measured_bytes)
            tables = self._tables(
                [job.addresses for job in jobs],
                tuple(job.numel for job in jobs),
                chosen.item,
                elements,
                phases,
                device,
                capturable=slot.capturable,
                check=functools.partial(_check_devices, jobs),
            )
            scratch = self._scratch(device)
            buffer, numbers = numbers_of(slot, wide, device, scratch)
            programs = tables.ticket_count
            if phases == "both":
                programs = min(programs, properties.multiprocessors * chosen.programs)
            arguments = (
                tables.items,
                tables.tensors,
                scratch.partials(tables.slot_count, wide),
                squares,
                scratch.counters(2 + 2 * len(jobs)),
                tables.ticket_count,
                len(jobs),
                applied,
                buffer,
                *numbers,
            )
        compiled_in = _options(slot, chosen, lead, lead_addresses[:5])
        compiled_in |= {"PHASES": phases, "EACH": each, "STEP_ON_DEVICE": slot.capturable}
        written = [] if phases == "measure" else [job.operands.parameter for job in jobs]
        return Launch(kernels.update_group, device, programs, arguments, compiled_in, written)

    # -- one tensor -----------------------------------------------------------------------------------------------------

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """See `Backend`."""
        self._launch_tensor(slot, gradient, "update", first)
        slot.state.pop("mean_square", None)

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor) -> Tensor:
        """See `ChecksOnDevice`."""
        applied = torch.ones((), dtype=torch.float32, device=gradient.device)
        self._launch_tensor(slot, gradient, "update", True, applied)
        return applied

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool) -> None:
        """See `Backend`."""
        slot.state["mean_square"] = self._launch_tensor(slot, gradient, "accumulate", first)

    def apply(self, slot: TensorSlot) -> None:
        """See `Backend`."""
        self._launch_tensor(slot, None, "apply", False)
        slot.state.pop("mean_square")

    def _launch_tensor(
        self,
        slot: TensorSlot,
        gradient: Tensor | None,
        action: str,
        first: bool,
        applied: Tensor | None = None,
    ) -> Tensor | float:
        """One launch; the summed mean square where the rule clips."""
        given = operands(slot, gradient)
        device, wide, n = given.parameter.device, _wide(given.parameter), given.parameter.numel()
        clips = slot.rule.clips_update
        before = slot.state["mean_square"] if clips and not first else None
        if n == 0:
            return 0.0 if not clips else torch.zeros((), dtype=wide, device=device) if before is None else before
        two_phases = action == "update" and (clips or applied is not None)
        check_device(given)
        addresses = [tensor.data_ptr() for tensor in _five(given)]
        with on(device):
            _check_capture(slot, device)
            chosen, properties = configuration(device, given.parameter.dtype), Device.of(device)
            (count,) = work.item_counts([n], chosen.item)
            if before is not None and not isinstance(before, Tensor):
                before = torch.full((), before, dtype=wide, device=device)
            after = torch.empty((), dtype=wide, device=device)
            scratch = self._scratch(device)
            buffer, numbers = numbers_of(slot, wide, device, scratch)
            programs = min(2 * count, properties.multiprocessors * chosen.programs) if two_phases else count
            arguments = (
                *addresses,
                n,
                count,
                _step(slot, device) if slot.capturable and action != "apply" else None,
                scratch.partials(count, wide),
                scratch.counters(4),
                before,
                after,
                applied,
                buffer,
                *numbers,
            )
        compiled_in = _options(slot, chosen, given, addresses) | {"ACTION": action, "FIRST": first}
        if action == "accumulate":  # left to the compiler it needs fewer registers than the cap
            compiled_in.pop("maxnreg", None)
        written = [] if action == "accumulate" else [given.parameter]
        self._launch([Launch(kernels.update_tensor, device, programs, arguments, compiled_in, written)])
        return after if clips else 0.0


def _alike(pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[list[Job]]:
    """The tensors that one launch can update together. Empty ones have nothing to update."""
    found: dict[Key, list[Job]] = {}
    last: Key = ()
    jobs: list[Job] = []
    for slot, gradient in pairs:
        g, m, v, p, k = given = operands(slot, gradient)
        assert g is not None
        n = p.numel()
        if n == 0:  # a shard may be empty where its parameter is not
            continue
        addresses = [g.data_ptr(), m.data_ptr(), v.data_ptr(), p.data_ptr(), k.data_ptr()]
        where = (p.get_device(), alignment(given, addresses))
        number = None if slot.capturable else slot.state["step"].item()
        addresses.append(_step(slot, p.device).data_ptr() if slot.capturable else 0)
        key = (id(slot.hyperparameters), number, slot.compensation, *where, g.dtype, m.dtype, v.dtype, p.dtype, k.dtype)
        if key != last:  # most follow others that are alike, and need no hash
            last, jobs = key, found.setdefault(key, [])
        jobs.append(Job(slot, given, addresses, n))
    return list(found.values())


def _options(slot: TensorSlot, chosen: Configuration, given: Operands, addresses: Sequence[int]) -> dict[str, Any]:
    """What is compiled in, and how."""
    dtypes = {name: TRITON_DTYPES[tensor.dtype] for name, tensor in zip("GMVPK", _five(given), strict=True)}
    cap = {"maxnreg": chosen.registers} if chosen.registers else {}
    return {
        **dtypes,
        **cap,
        "CLIP": slot.rule.clips_update,
        "ZERO1": is_zero(slot.hyperparameters.beta1),
        "ZERO2": is_zero(slot.hyperparameters.beta2),
        "L2": slot.rule.l2,
        "MAXIMIZE": slot.hyperparameters.maximize,
        "COMPENSATION": slot.compensation,
        "ALIGNMENT": alignment(given, addresses),
        "WIDE": TRITON_DTYPES[_wide(given.parameter)],
        "HINTS": chosen.hints,
        "TILES": chosen.tiles,
        "BLOCK": chosen.block,
        "TAIL": chosen.tail,
        "num_warps": chosen.warps,
        "enable_fp_fusion": False,  # so that release and step(), which are two kernels, give the same bits
    }


def _five(given: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In the order of `Operands`; where no gradient is needed the parameter stands for it."""
    gradient, exp_avg, exp_avg_sq, parameter, kept = given
    return parameter if gradient is None else gradient, exp_avg, exp_avg_sq, parameter, kept


def _wide(parameter: Tensor) -> torch.dtype:
    return DTYPES[compute_dtype(dtype_name(parameter.dtype))]


def _squares(jobs: Sequence[Job]) -> Tensor:
    """Room for a mean square of each."""
    return torch.empty(len(jobs), dtype=_wide(jobs[0].operands.parameter), device=_device(jobs))


def _device(jobs: Sequence[Job]) -> torch.device:
    return jobs[0].operands.parameter.device


def _check_devices(jobs: Sequence[Job]) -> None:
    for job in jobs:
        check_device(job.operands)


def _step(slot: TensorSlot, device: torch.device) -> Tensor:
    """t where the kernels read it."""
    step: Tensor = slot.state["step"]
    if step.device != device:
        raise InvalidArgument(
            f"capturable=True needs the step counts on {device}, and one is on {step.device}: it was set after the first step. "
            "Construct the optimizer with capturable=True and load its state_dict()."
        )
    return step


def _check_capture(slot: TensorSlot, device: torch.device) -> None:
    """A graph would repeat for ever the number of updates that the host knows while it is captured."""
    if not slot.capturable and capturing(device):
        raise Refused(
            "a step can be captured in a CUDA graph only where the number of updates is kept on the device; construct the "
            "optimizer with capturable=True."
        )


def _combined(flags: dict[torch.device, Tensor]) -> Tensor:
    """The product of the flags of all devices, put back into each of them."""
    first, *others = flags.values()
    for other in others:
        first.mul_(other.to(first.device, non_blocking=True))
    for other in others:
        other.copy_(first, non_blocking=True)
    return first
