"""Where the sections run, the sizes they have there, and how time is taken."""

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
"""Elements of the parameters of GPT-2, and of models like those of 1 and 7 billion parameters."""

COPIED_ELEMENTS, FILLER_BYTES = 2**30, 2**29
"""Of the copy whose bandwidth is the floor, and of what keeps the device busy before a measurement."""

DRY_SHAPES = {"124M": [130, 3], "1B": [200], "7B": [5]}


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the parameters of a model are kept, and what a step has to move at least."""

    name: str
    dtype: torch.dtype
    compensation: str

    def floor_bytes(self, elements: int) -> int:
        """g is read; m, v, p and k are read and written. Moments have the parameter's dtype."""
        size = self.dtype.itemsize
        return elements * (size + 2 * (3 * size + (2 if self.compensation == "split" else 0)))


STORAGES = (
    Storage("fp32", torch.float32, "none"),
    Storage("bf16", torch.bfloat16, "none"),
    Storage("bf16+split", torch.bfloat16, "split"),
)
BETAS = (0.9, 0.99)
"""With which a bfloat16 second moment decays, so that every optimizer keeps its states in the parameter's dtype."""


@dataclasses.dataclass
class Setting:
    """The device; `dry`: the CPU, and everything small; `seconds` that the whole run may take."""

    dry: bool
    full_parity: bool = False
    seconds: float = 430.0
    _started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def out_of_time(self) -> bool:
        """Whether what is not needed most should be left out."""
        return time.monotonic() - self._started > self.seconds

    @property
    def device(self) -> str:
        """Of the parameters."""
        return "cpu" if self.dry else "cuda"

    def description(self) -> dict[str, Any]:
        """What the device is."""
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
        """Elements of a model's parameters."""
        return (DRY_SHAPES if self.dry else SHAPES)[model]

    def few(self, count: int) -> int:
        """A number of repetitions."""
        return min(count, 1) if self.dry else count

    def parameters(self, numels: list[int], dtype: torch.dtype) -> list[nn.Parameter]:
        """Parameters of about 1 with gradients of about 0.02, the same at each call."""
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
        """Give memory back, that of the filler too: a peak that is measured afterwards is without it."""
        self.__dict__.pop("_filler", None)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def device_ms(self, run: Callable[[], Any], repetitions: int = 20) -> float:
        """Median milliseconds that the device works on `run`.

        Before each, the device is kept busy for longer than the host needs to launch it, as a backward pass does; so this
        is the work, and not the wait for launches.
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
        """Milliseconds of `run` when it is called over and over: in all, and until the host has launched it."""
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
        """Bytes read and written by a copy in a second."""
        elements = 2**12 if self.dry else COPIED_ELEMENTS
        source, target = (torch.zeros(elements, device=self.device) for _ in range(2))
        return 2 * source.nbytes / (1e-3 * self.device_ms(lambda: target.copy_(source)))
