"""The memory that a launch needs beside its tensors: small tables, and scratch that launches share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....core.errors import RefusedError
from . import devices

CAPTURES = 4
"""Captures of a step that a step outside provides for."""

REMEMBERED = 64
"""Sets of constants on a device."""


class Uploaded(NamedTuple):
    """A table on a device, and the stream that it was uploaded on; None where nothing needs to wait for it."""

    tensor: Tensor
    stream: torch.cuda.Stream | None

    def here(self) -> Tensor:
        """The table, for launches on the current stream: another one than its own waits until it is there."""
        if self.stream is not None:
            device = self.tensor.device
            if devices.stream_of(device) != self.stream.cuda_stream and not devices.capturing(device):
                now = torch.cuda.current_stream(device)
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

    def drop(self, name: Hashable) -> None:
        """Give back what was provided for the table of that name."""
        self._ready.pop(name, None)

    def __call__(self, name: Hashable, values: np.ndarray, device: torch.device) -> Uploaded:
        """A copy of `values` on the device.

        Raises:
            RefusedError: a graph is being captured, and nothing was provided for this table.
        """
        host = torch.from_numpy(values)
        if not devices.capturing(device):
            if device.type != "cuda":
                return Uploaded(host, None)
            return Uploaded(host.pin_memory().to(device, non_blocking=True), torch.cuda.current_stream(device))
        ready = self._ready.get(name)
        if not ready or ready[-1].numel() != values.nbytes:
            raise RefusedError(
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
        self._squares: dict[torch.dtype, Tensor] = {}
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

    def square(self, dtype: torch.dtype) -> Tensor:
        """A 0-d number, not set to anything: the mean square of the one tensor that a launch updates."""
        kept = self._squares.get(dtype)
        if kept is None:
            kept = self._squares[dtype] = torch.empty((), dtype=dtype, device=self._device)
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

    def __call__(self, device: torch.device, captured: bool) -> Scratch:
        """The scratch of the device's current stream, or for a graph that captures it."""
        if captured:
            return Scratch(device)
        key = (device, devices.stream_of(device))
        kept = self._by_stream.get(key)
        if kept is None:
            kept = self._by_stream[key] = Scratch(device)
        return kept


def _rounded_up(count: int) -> int:
    return 1 << max(10, (count - 1).bit_length())
