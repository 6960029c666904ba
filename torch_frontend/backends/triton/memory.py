"""The memory that a launch reads and writes: where tensors lie, small tables, and scratch that launches share."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....core.errors import Refused, UnsupportedTensor
from ...communication.shards import PLAIN, local
from ..backend import TensorSlot
from .availability import dense

PER_ELEMENT = ("exp_avg", "exp_avg_sq", "compensation")
WIDEST = 16
"""Bytes of the widest access."""

CAPTURES = 4
"""Captures of a step that a step outside provides for."""

REMEMBERED = 64
"""Sets of constants on a device."""


class Operands(NamedTuple):
    """The tensors of one update, all in the memory order of the parameter. Without compensation, `kept` is the parameter."""

    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameter: Tensor
    kept: Tensor


def operands(slot: TensorSlot, gradient: Tensor | None) -> Operands:
    """What the kernels get of a slot. A sharded tensor is its local shard.

    A gradient that is laid out otherwise than its parameter is copied into the parameter's order, which needs the memory of
    a second gradient for the time of the launch. State that is (it came from a file) is laid out anew, once.

    Raises:
        UnsupportedTensor: the parameter has gaps in memory or overlaps.
    """
    parameter, state = slot.parameter, slot.state
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    kept = state.get("compensation", parameter)
    simple = type(parameter) in PLAIN and parameter.is_contiguous()
    if not (simple and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and kept.is_contiguous()):
        parameter = local(parameter)
        check_dense(parameter)
        exp_avg, exp_avg_sq, kept = (_kept(state, name, parameter) for name in PER_ELEMENT)
    if gradient is not None and not (simple and gradient.is_contiguous()):
        here: Tensor = local(gradient)
        gradient = here if alike(here, parameter) else in_order_of(parameter, here)
    if gradient is not None and gradient.is_neg():
        gradient = gradient.resolve_neg()
    return Operands(gradient, exp_avg, exp_avg_sq, parameter, kept)


def alignment(given: Operands, addresses: Sequence[int]) -> int:
    """Bytes that all five addresses are multiples of: those of the widest access, or only those of the narrowest element."""
    gradient, exp_avg, exp_avg_sq, parameter, kept = addresses
    if (gradient | exp_avg | exp_avg_sq | parameter | kept) % WIDEST == 0:
        return WIDEST
    return min(tensor.element_size() for tensor in given if tensor is not None)


def check_device(given: Operands) -> None:
    """Raise `UnsupportedTensor` if not all of a parameter's tensors are where it is: a kernel would read other memory."""
    device = given.parameter.device
    for name, tensor in given._asdict().items():
        if tensor is not None and tensor.device != device:
            raise UnsupportedTensor(
                f"parameter of shape {tuple(given.parameter.shape)} is on {device}, and its {name} on {tensor.device}; move "
                "the model before the first step, or load the optimizer's state_dict() after moving it."
            )


def check_dense(parameter: Tensor) -> None:
    """Raise `UnsupportedTensor` for a parameter that the kernels cannot walk through."""
    if not dense(parameter):
        raise UnsupportedTensor(
            f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} leaves gaps in memory or overlaps; "
            "make it dense (parameter.data = parameter.data.contiguous()), or use backend='eager'."
        )


def _kept(state: MutableMapping[str, Any], name: str, parameter: Tensor) -> Tensor:
    """The state of that name in the memory order of the parameter; the parameter where there is none."""
    if name not in state:
        return parameter
    if not alike(local(state[name]), parameter):
        state[name] = in_order_of(parameter, local(state[name]))
    return local(state[name])


def alike(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the elements of both follow one another in memory in the same order, without gaps."""
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return True
    strides = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(size <= 1 or mine == other for size, mine, other in strides)


def in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A copy of `tensor` that lies as the parameter does."""
    return torch.empty_like(parameter, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)


def capturing(device: torch.device) -> bool:
    """Whether launches are being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Uploaded(NamedTuple):
    """A table on a device, and the stream that it was uploaded on; None where nothing needs to wait for it."""

    tensor: Tensor
    stream: torch.cuda.Stream | None

    def here(self) -> Tensor:
        """The table, for launches on the current stream: another one than its own waits until it is there."""
        if self.stream is not None and not capturing(self.tensor.device):
            now = torch.cuda.current_stream(self.tensor.device)
            if now != self.stream:
                now.wait_stream(self.stream)
                self.tensor.record_stream(now)
        return self.tensor


class Uploads:
    """Small tables on their way to a device, without waiting for it.

    While a CUDA graph is captured no page-locked memory can be had, so some is kept ready for every table: the steps before,
    which are not captured, provide for those that are.
    """

    def __init__(self) -> None:
        self._ready: dict[Hashable, list[Tensor]] = {}
        self._captured: list[Tensor] = []  # a graph reads them again at each replay

    def provide(self, name: Hashable, size: int, device: torch.device) -> None:
        """Have memory for some captures of the table of that name, of so many bytes. Not while capturing."""
        ready = self._ready.get(name)
        if not ready or ready[0].numel() != size:
            pin = device.type == "cuda"
            self._ready[name] = list(torch.empty(CAPTURES, size, dtype=torch.uint8, pin_memory=pin).unbind())

    def __call__(self, name: Hashable, values: np.ndarray, device: torch.device) -> Uploaded:
        """A copy of `values` on the device.

        Raises:
            Refused: a graph is being captured, and nothing was provided for this table.
        """
        host = torch.from_numpy(values)
        if not capturing(device):
            if device.type != "cuda":
                return Uploaded(host, None)
            return Uploaded(host.pin_memory().to(device, non_blocking=True), torch.cuda.current_stream(device))
        ready = self._ready.get(name)
        if not ready or ready[-1].numel() != values.nbytes:
            raise Refused(
                "a step cannot be captured in a CUDA graph before one of the same parameters was taken without: call "
                "optimizer.step() outside of the capture first (and again after every few captures)."
            )
        held = ready.pop().view(host.dtype).view(host.shape).copy_(host)
        return Uploaded(self.keep(held).to(device, non_blocking=True), None)

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor as long as the backend, for a graph that has its address."""
        self._captured.append(tensor)
        return tensor


class Scratch:
    """Counters, partial sums and constants of one stream. Launches on a stream follow each other, so they can share them.

    Every launch leaves the counters as it found them: zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._partials: dict[torch.dtype, Tensor] = {}
        self._constants: dict[tuple[torch.dtype, tuple[float, ...]], Tensor] = {}

    def counters(self, count: int) -> Tensor:
        """At least `count` int32 zeros."""
        if self._counters.numel() < count:
            self._counters = torch.zeros(_rounded_up(count), dtype=torch.int32, device=self._device)
        return self._counters

    def partials(self, count: int, dtype: torch.dtype) -> Tensor:
        """At least `count` numbers, not set to anything."""
        kept = self._partials.get(dtype)
        if kept is None or kept.numel() < count:
            kept = self._partials[dtype] = torch.empty(_rounded_up(count), dtype=dtype, device=self._device)
        return kept

    def constants(self, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """These numbers, not to be written to. `torch.full` and not `torch.tensor`, a copy, which could not be captured."""
        kept = self._constants.get((dtype, values))
        if kept is None:
            if len(self._constants) >= REMEMBERED:
                self._constants.clear()
            kept = torch.stack([torch.full((), value, dtype=dtype, device=self._device) for value in values])
            self._constants[dtype, values] = kept
        return kept


class Scratches:
    """The scratch of every stream; a captured graph gets memory of its own, which the graph keeps."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[torch.device, int], Scratch] = {}

    def __call__(self, device: torch.device) -> Scratch:
        """The scratch of the device's current stream."""
        if capturing(device):
            return Scratch(device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if (device, stream) not in self._by_stream:
            self._by_stream[device, stream] = Scratch(device)
        return self._by_stream[device, stream]


def _rounded_up(count: int) -> int:
    return 1 << max(10, (count - 1).bit_length())
