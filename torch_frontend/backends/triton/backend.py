"""The Triton backend: `Backend` by the kernels of `kernels`, without waiting for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....core.dtypes import compute_dtype
from ....core.errors import InvalidArgument, Refused, UnsupportedTensor
from ...array_ops import DTYPES, dtype_name
from ..backend import TensorSlot
from . import kernels, work
from .availability import interpreted
from .configuration import Configuration, Device, configuration, wave_elements
from .interpreter import call_helpers_directly, count_with_scalars, round_like_a_device
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
    """One tensor to update in a launch for many."""

    slot: TensorSlot
    operands: Operands
    addresses: list[int]


class TritonBackend:
    """See `Backend`, and `ChecksOnDevice`.

    update_all() is one launch for each parameter group (more where dtypes, devices or step counts differ within it). Under
    release a large tensor is one launch, and small ones, which a launch costs more than their update, wait for each other.
    """

    name = "triton"
    one_launch = True

    def __init__(self) -> None:
        if interpreted():
            round_like_a_device()
            count_with_scalars()
            call_helpers_directly()
        self._scratch = Scratches()
        self._tables = GroupTables()

    # -- many tensors ---------------------------------------------------------------------------------------------------

    def update_all(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        for jobs in _alike(pairs):
            clips = jobs[0].slot.rule.clips_update
            self._launch_group(jobs, "both" if clips else "write", None, grad_scale)

    def update_all_if_finite(self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, grad_scale: Tensor | None = None) -> Tensor:
        """See `ChecksOnDevice`. Everything is measured before anything is written: two launches instead of one."""
        groups = _alike(pairs)
        devices = {slot.parameter.device for slot, _ in pairs}
        flags = {device: torch.ones((), dtype=torch.float32, device=device) for device in devices}
        squares = [self._launch_group(jobs, "measure", flags[_device(jobs)], grad_scale) for jobs in groups]
        applied = _combined(flags)
        for jobs, square in zip(groups, squares, strict=True):
            self._launch_group(jobs, "write", flags[_device(jobs)], grad_scale, square)
        return applied

    def update_each_if_finite(
        self, pairs: Sequence[tuple[TensorSlot, Tensor]], *, grad_scale: Tensor | None = None
    ) -> list[Tensor]:
        """See `ChecksOnDevice`. Of several alike two launches, of one by itself one."""
        if len(pairs) == 1:
            return [self.update_if_finite(*pairs[0], grad_scale=grad_scale)]
        applied: dict[int, Tensor] = {}
        for jobs in _alike(pairs):
            flags = torch.ones(len(jobs), dtype=torch.float32, device=_device(jobs))
            squares = self._launch_group(jobs, "measure", flags, grad_scale, each=True)
            self._launch_group(jobs, "write", flags, grad_scale, squares, each=True)
            applied |= zip((id(job.slot) for job in jobs), flags.unbind(), strict=True)
        return [
            applied[id(slot)] if id(slot) in applied else torch.ones((), device=slot.parameter.device)  # empty: nothing to do
            for slot, _ in pairs
        ]

    def _launch_group(
        self,
        jobs: Sequence[Job],
        phases: str,
        applied: Tensor | None,
        grad_scale: Tensor | None,
        squares: Tensor | None = None,
        *,
        each: bool = False,
    ) -> Tensor:
        """One launch; the mean squares, which "write" takes from "measure"."""
        slot, lead, lead_addresses = jobs[0]
        assert lead.gradient is not None
        device, wide = lead.parameter.device, _wide(lead.parameter)
        chosen, properties = configuration(device, lead.parameter.dtype), Device.of(device)
        measured_bytes = lead.gradient.element_size() + lead.exp_avg_sq.element_size()
        elements = wave_elements(chosen, properties, measured_bytes)
        with _on(device):
            _check_capture(slot, device)
            given, addresses = [job.operands for job in jobs], [job.addresses for job in jobs]
            tables = self._tables(given, addresses, _steps(jobs), chosen.item, elements, phases, device)
            scratch = self._scratch(device)
            if squares is None:
                squares = torch.empty(len(jobs), dtype=wide, device=device)
            buffer, arguments = numbers_of(slot, wide, device, scratch)
            compiled_in = _options(slot, chosen, lead, lead_addresses)
            compiled_in |= {"PHASES": phases, "EACH": each, "STEP_ON_DEVICE": slot.capturable}
            programs = tables.ticket_count
            if phases == "both":
                programs = min(programs, properties.multiprocessors * chosen.programs)
            kernel: Any = kernels.update_group
            kernel[(programs,)](
                tables.items,
                tables.tensors,
                scratch.partials(tables.slot_count, wide),
                squares,
                scratch.counters(2 + 2 * len(jobs)),
                tables.ticket_count,
                len(jobs),
                applied,
                _scale_on(device, grad_scale),
                buffer,
                *arguments,
                **compiled_in,
            )
        if phases != "measure":
            _written([job.operands.parameter for job in jobs])
        return squares

    # -- one tensor -----------------------------------------------------------------------------------------------------

    def update(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        self._launch_tensor(slot, gradient, "update", first, grad_scale)
        slot.state.pop("mean_square", None)

    def update_if_finite(self, slot: TensorSlot, gradient: Tensor, *, grad_scale: Tensor | None = None) -> Tensor:
        """See `ChecksOnDevice`."""
        applied = torch.ones((), dtype=torch.float32, device=gradient.device)
        self._launch_tensor(slot, gradient, "update", True, grad_scale, applied)
        return applied

    def accumulate(self, slot: TensorSlot, gradient: Tensor, *, first: bool, grad_scale: Tensor | None = None) -> None:
        """See `Backend`."""
        slot.state["mean_square"] = self._launch_tensor(slot, gradient, "accumulate", first, grad_scale)

    def apply(self, slot: TensorSlot) -> None:
        """See `Backend`."""
        self._launch_tensor(slot, None, "apply", False, None)
        slot.state.pop("mean_square")

    def _launch_tensor(
        self,
        slot: TensorSlot,
        gradient: Tensor | None,
        action: str,
        first: bool,
        grad_scale: Tensor | None,
        applied: Tensor | None = None,
    ) -> Tensor | float:
        """One launch; the summed mean square where the rule clips."""
        given = operands(slot, gradient)
        device, wide, n = given.parameter.device, _wide(given.parameter), given.parameter.numel()
        clips = slot.rule.clips_update
        before = slot.state["mean_square"] if clips and not first else None
        if n == 0:
            return 0.0 if not clips else torch.zeros((), dtype=wide, device=device) if before is None else before
        chosen, properties = configuration(device, given.parameter.dtype), Device.of(device)
        (count,) = work.item_counts([n], chosen.item)
        two_phases = action == "update" and (clips or applied is not None)
        check_device(given)
        addresses = [tensor.data_ptr() for tensor in _five(given)]
        with _on(device):
            _check_capture(slot, device)
            if before is not None and not isinstance(before, Tensor):
                before = torch.full((), before, dtype=wide, device=device)
            after = torch.empty((), dtype=wide, device=device)
            scratch = self._scratch(device)
            buffer, arguments = numbers_of(slot, wide, device, scratch)
            compiled_in = _options(slot, chosen, given, addresses) | {"ACTION": action, "FIRST": first}
            programs = min(2 * count, properties.multiprocessors * chosen.programs) if two_phases else count
            kernel: Any = kernels.update_tensor
            kernel[(programs,)](
                *addresses,
                n,
                count,
                _step(slot, device) if slot.capturable and action != "apply" else None,
                scratch.partials(count, wide),
                scratch.counters(4),
                before,
                after,
                applied,
                _scale_on(device, grad_scale),
                buffer,
                *arguments,
                **compiled_in,
            )
        if action != "accumulate":
            _written([given.parameter])
        return after if clips else 0.0


def _alike(pairs: Sequence[tuple[TensorSlot, Tensor]]) -> list[list[Job]]:
    """The tensors that one launch can update together. Empty ones have nothing to update."""
    found: dict[Key, list[Job]] = {}
    last: Key = ()
    jobs: list[Job] = []
    for slot, gradient in pairs:
        given = operands(slot, gradient)
        g, m, v, p, k = _five(given)
        addresses = [g.data_ptr(), m.data_ptr(), v.data_ptr(), p.data_ptr(), k.data_ptr()]
        number = None if slot.capturable else slot.step_number
        where = (p.get_device(), alignment(given, addresses))
        key = (id(slot.hyperparameters), number, slot.compensation, *where, g.dtype, m.dtype, v.dtype, p.dtype, k.dtype)
        if p.numel() == 0:  # a shard may be empty where its parameter is not
            continue
        if key != last:  # most follow others that are alike, and need no hash
            last, jobs = key, found.setdefault(key, [])
        jobs.append(Job(slot, given, addresses))
    return list(found.values())


def _options(slot: TensorSlot, chosen: Configuration, given: Operands, addresses: Sequence[int]) -> dict[str, Any]:
    """What is compiled in, and how."""
    dtypes = {name: TRITON_DTYPES[tensor.dtype] for name, tensor in zip("GMVPK", _five(given), strict=True)}
    cap = {"maxnreg": chosen.registers} if chosen.registers else {}
    return {
        **dtypes,
        **cap,
        "CLIP": slot.rule.clips_update,
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


def _device(jobs: Sequence[Job]) -> torch.device:
    return jobs[0].operands.parameter.device


def _steps(jobs: Sequence[Job]) -> list[Tensor] | None:
    return [_step(job.slot, _device(jobs)) for job in jobs] if jobs[0].slot.capturable else None


def _step(slot: TensorSlot, device: torch.device) -> Tensor:
    """t where the kernels read it."""
    step: Tensor = slot.state["step"]
    if step.device != device:
        raise InvalidArgument(
            f"capturable=True needs the step counts on {device}, and one is on {step.device}: it was set after the first step. "
            "Construct the optimizer with capturable=True and load its state_dict()."
        )
    return step


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; that is made the tensor's own.

    Raises:
        UnsupportedTensor: a parameter is (added, or moved since the optimizer was constructed) where no kernel can run.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if not interpreted():
        raise UnsupportedTensor(
            f"backend='triton' cannot update a parameter on {device}; move the model to a CUDA device, or construct the "
            "optimizer anew with backend='auto'."
        )
    return contextlib.nullcontext()


def _check_capture(slot: TensorSlot, device: torch.device) -> None:
    """A graph would repeat for ever the number of updates that the host knows while it is captured."""
    if not slot.capturable and capturing(device):
        raise Refused(
            "a step can be captured in a CUDA graph only where the number of updates is kept on the device; construct the "
            "optimizer with capturable=True."
        )


def _scale_on(device: torch.device, grad_scale: Tensor | None) -> Tensor | None:
    return None if grad_scale is None else grad_scale.to(device, non_blocking=True)


def _combined(flags: dict[torch.device, Tensor]) -> Tensor:
    """The product of the flags of all devices, put back into each of them."""
    first, *others = flags.values()
    for other in others:
        first.mul_(other.to(first.device, non_blocking=True))
    for other in others:
        other.copy_(first, non_blocking=True)
    return first


def _written(parameters: list[Tensor]) -> None:
    """Tell autograd that parameters changed under it: a kernel leaves no trace of its own."""
    try:
        torch.autograd.graph.increment_version(parameters)
    except TypeError:  # an older version takes one at a time
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
