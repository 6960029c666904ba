"""The device and the sizes with which the sections run, and measurement of time."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SHAPES: dict[str, list[int]] = {
    "124M": [768 * 2304, 768 * 768, 768 * 3072, 768 * 3072] * 12 + [768] * 98 + [50257 * 768, 1024 * 768],
    "1B": [2048 * 2048] * 64 + [2048 * 8192] * 48 + [128256 * 2048] + [2048] * 33,
    "7B": [4096 * 4096] * 128 + [4096 * 11008] * 96 + [32000 * 4096] * 2 + [4096] * 65,
}
"""Numbers of elements of the parameters of GPT-2, and of models with 1 and 7 billion parameters."""

COPIED_ELEMENTS, FILLER_BYTES = 2**30, 2**29
"""Size of the copy whose bandwidth defines the floor, and of the work that precedes a measurement."""

DRY_SHAPES = {"124M": [130, 3], "1B": [200], "7B": [5]}


@dataclasses.dataclass(frozen=True)
class Storage:
    """The dtype and compensation of a model's parameters."""

    name: str
    dtype: torch.dtype
    compensation: str

    def floor_bytes(self, elements: int) -> int:
        """Return the bytes that a step moves at least: g is read; m, v, p and k are read and written.

        The moments have the parameter's dtype.
        """
        size = self.dtype.itemsize
        return elements * (size + 2 * (3 * size + (2 if self.compensation == "split" else 0)))


STORAGES = (
    Storage("fp32", torch.float32, "none"),
    Storage("bf16", torch.bfloat16, "none"),
    Storage("bf16+split", torch.bfloat16, "split"),
)
BETAS = (0.9, 0.99)
"""Betas with which a bfloat16 second moment decays, so that every optimizer stores its state in the parameter's dtype."""


@dataclasses.dataclass
class Setting:
    """The device and its sizes. dry: the CPU with small sizes. seconds: time limit of the whole run."""

    dry: bool
    full_parity: bool = False
    seconds: float = 430.0
    _started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit is reached, so that optional measurements should be left out."""
        return time.monotonic() - self._started > self.seconds

    @property
    def device(self) -> str:
        """The device of the parameters."""
        return "cpu" if self.dry else "cuda"

    def description(self) -> dict[str, Any]:
        """Return the device's name and properties."""
        if self.dry:
            return {"name": "cpu, Triton's interpreter"}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cache_bytes": getattr(properties, "L2_cache_size", None),
            "capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
        }

    def shapes(self, model: str) -> list[int]:
        """Return the numbers of elements of a model's parameters."""
        return (DRY_SHAPES if self.dry else SHAPES)[model]

    def few(self, count: int) -> int:
        """Return a number of repetitions: `count`, or at most 1 in a dry run."""
        return min(count, 1) if self.dry else count

    def parameters(self, numels: list[int], dtype: torch.dtype) -> list[nn.Parameter]:
        """Return seeded normal parameters with gradients of standard deviation 0.02; the same ones at each call."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = []
        for numel in numels:
            made.append(nn.Parameter(torch.empty(numel, dtype=dtype, device=self.device).normal_(generator=generator)))
            made[-1].grad = torch.empty_like(made[-1]).normal_(std=0.02, generator=generator)
        return made

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def clean_up(self) -> None:
        """Free cached memory, including the filler's, so that it is not part of a peak measured later."""
        self.__dict__.pop("_filler", None)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def device_ms(self, run: Callable[[], Any], repetitions: int = 20) -> float:
        """Return the median milliseconds that the device works on `run`.

        The device is kept busy before each run for longer than the host needs to launch it, as in a backward pass, so that
        the time does not include waiting for launches.
        """
        for _ in range(self.few(3)):
            run()
        if self.dry:
            started = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - started)
        taken = []
        for _ in range(repetitions):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            for _ in range(8):
                self._filler.copy_(self._filler.flip(0))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            taken.append(start.elapsed_time(end))
        return statistics.median(taken)

    def wall_ms(self, run: Callable[[], Any], repetitions: int = 20) -> dict[str, float]:
        """Return the milliseconds of `run`, called repeatedly: in total, and until the host has launched it."""
        repetitions = self.few(repetitions)
        for _ in range(self.few(3)):
            run()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(repetitions):
            run()
        launched = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        return {"back_to_back_ms": 1e3 * (done - started) / repetitions, "host_ms": 1e3 * (launched - started) / repetitions}

    @functools.cached_property
    def _filler(self) -> torch.Tensor:
        return torch.zeros(FILLER_BYTES, dtype=torch.uint8, device=self.device)

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        elements = 2**12 if self.dry else COPIED_ELEMENTS
        source, target = (torch.zeros(elements, device=self.device) for _ in range(2))
        return 2 * source.nbytes / (1e-3 * self.device_ms(lambda: target.copy_(source)))
