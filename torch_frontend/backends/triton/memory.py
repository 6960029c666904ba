"""The memory of a launch apart from its tensors: small tables, and scratch that launches share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....core.errors import RefusedError
from . import devices

CAPTURES = 4
"""Number of captures of a step for which an uncaptured step allocates page-locked memory."""

CACHED_NUMBERS = 64
"""Largest number of sets of scalars that are cached."""


class Uploaded(NamedTuple):
    """A table on a device, and the stream on which it was uploaded; None if no other stream has to wait for it."""

    tensor: Tensor
    stream: torch.cuda.Stream | None

    def here(self) -> Tensor:
        """Return the table for launches on the current stream, which waits for the upload if that used another stream."""
        if self.stream is not None:
            device = self.tensor.device
            if devices.stream_of(device) != self.stream.cuda_stream and not devices.capturing(device):
                now = torch.cuda.current_stream(device)
                now.wait_stream(self.stream)
                self.tensor.record_stream(now)
        return self.tensor


class Uploads:
    """Uploads small tables to a device without waiting for it.

    Page-locked memory cannot be allocated while a CUDA graph is captured: every uncaptured step of a capturable optimizer
    allocates some for later captures.
    """

    def __init__(self) -> None:
        self._ready: dict[Hashable, list[Tensor]] = {}
        self._captured: list[Tensor] = []  # graphs read them at each replay

    def provide(self, name: Hashable, size: int, device: torch.device) -> None:
        """Allocate memory for `CAPTURES` captures of a table of this name and of `size` bytes; not while capturing."""
        ready = self._ready.get(name)
        if not ready or ready[0].numel() != size:
            pin = device.type == "cuda"
            self._ready[name] = list(torch.empty(CAPTURES, size, dtype=torch.uint8, pin_memory=pin).unbind())

    def drop(self, name: Hashable) -> None:
        """Free the memory that was provided for the table of this name."""
        self._ready.pop(name, None)

    def __call__(self, name: Hashable, values: np.ndarray, device: torch.device) -> Uploaded:
        """Return a copy of `values` on the device.

        Raises:
            RefusedError: a graph is being captured, and no memory was provided for this table.
        """
        host = torch.from_numpy(values)
        if not devices.capturing(device):
            if device.type != "cuda":
                return Uploaded(host, None)
            return Uploaded(host.pin_memory().to(device, non_blocking=True), torch.cuda.current_stream(device))
        ready = self._ready.get(name)
        if not ready or ready[-1].numel() != values.nbytes:
            raise RefusedError(
                "a step can be captured in a CUDA graph only after an uncaptured one of the same parameters: call "
                "optimizer.step() outside of the capture first (and again after every few captures)."
            )
        held = ready.pop().view(host.dtype).view(host.shape).copy_(host)
        return Uploaded(self.keep(held).to(device, non_blocking=True), None)

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor alive as long as the backend, because a graph has its address."""
        self._captured.append(tensor)
        return tensor


Constants = dict[tuple[torch.dtype, tuple[float, ...]], Tensor]
"""Sets of scalars on a device, by their dtype and values."""


class Scratch:
    """Counters, partial sums and constants of one stream; launches on a stream run one after the other and can share them.

    Every launch resets the counters to zero.

    Args:
        device: of all memory.
        known: constants that were made before this graph was captured; None outside of a capture.
    """

    def __init__(self, device: torch.device, known: Constants | None = None) -> None:
        self._device = device
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._partials: dict[torch.dtype, Tensor] = {}
        self._squares: dict[torch.dtype, Tensor] = {}
        self.constants_made: Constants = {} if known is None else known

    def counters(self, count: int) -> Tensor:
        """Return at least `count` int32 zeros."""
        if self._counters.numel() < count:
            self._counters = torch.zeros(_rounded_up(count), dtype=torch.int32, device=self._device)
        return self._counters

    def partials(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return at least `count` uninitialised numbers."""
        cached = self._partials.get(dtype)
        if cached is None or cached.numel() < count:
            cached = self._partials[dtype] = torch.empty(_rounded_up(count), dtype=dtype, device=self._device)
        return cached

    def square(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised 0-d number for the mean square of the one tensor that a launch updates."""
        cached = self._squares.get(dtype)
        if cached is None:
            cached = self._squares[dtype] = torch.empty((), dtype=dtype, device=self._device)
        return cached

    def constants(self, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Return these numbers as a tensor that must not be written to.

        It is made by `torch.full`, because `torch.tensor` copies from the host, which cannot be captured.
        """
        cached = self.constants_made.get((dtype, values))
        if cached is None:
            if len(self.constants_made) >= CACHED_NUMBERS:
                self.constants_made.clear()
            cached = torch.stack([torch.full((), value, dtype=dtype, device=self._device) for value in values])
            self.constants_made[dtype, values] = cached
        return cached


class ScratchByStream:
    """The scratch of every stream; a captured graph gets its own, which the graph keeps alive.

    A graph's constants are those of the steps before it, so that it does not make them again at each replay.
    """

    def __init__(self) -> None:
        self._by_stream: dict[tuple[torch.device, int], Scratch] = {}
        self._captured: dict[int, Tensor] = {}  # constants that graphs read at each replay

    def __call__(self, device: torch.device, captured: bool) -> Scratch:
        """Return the scratch of the device's current stream; a new one while a graph is captured."""
        if captured:
            known: Constants = {}
            for (other, _), scratch in self._by_stream.items():
                known |= scratch.constants_made if other == device else {}
            self._captured |= {id(tensor): tensor for tensor in known.values()}
            return Scratch(device, known)
        key = (device, devices.stream_of(device))
        cached = self._by_stream.get(key)
        if cached is None:
            cached = self._by_stream[key] = Scratch(device)
        return cached


def _rounded_up(count: int) -> int:
    return 1 << max(10, (count - 1).bit_length())
