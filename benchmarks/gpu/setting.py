"""The device and the sizes with which the stages run, and measurement of time. A dry run takes the same lines on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support import failure
from penstock.core.codings.eight_bit import BLOCK, SMALLEST
from penstock.torch_frontend.backends import count_updates

SHAPES: dict[str, list[int]] = {
    "124M": [768 * 2304, 768 * 768, 768 * 3072, 768 * 3072] * 12 + [768] * 98 + [50257 * 768, 1024 * 768],
    "1B": [2048 * 2048] * 64 + [2048 * 8192] * 48 + [128256 * 2048] + [2048] * 33,
}
"""Numbers of elements of the parameters of GPT-2, and of a model with 1 billion parameters."""

DRY_SHAPES = {"124M": [130, 3], "1B": [200]}
FILLER_BYTES = 2**29
BETAS = (0.9, 0.99)
"""Betas with which a bfloat16 second moment decays, so that every optimizer stores its state in the parameter's dtype."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The dtype and compensation of a model's parameters; the moments have the parameter's dtype, or 8 bits if it is coded."""

    name: str
    dtype: torch.dtype
    compensation: str = "none"
    coded: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of an optimizer."""
        return {"compensation": self.compensation, "state_dtype": "8bit" if self.coded else None}

    @property
    def moment_bytes(self) -> float:
        """Bytes per element of one moment: with a code, a part of its block's scale."""
        return 1 + 4 / BLOCK if self.coded else self.dtype.itemsize

    @property
    def measured_bytes(self) -> float:
        """Bytes per element that the measure phase reads: g and v."""
        return self.dtype.itemsize + self.moment_bytes

    @property
    def floor_bytes(self) -> float:
        """Bytes per element that a step moves at least: g is read; m, v, p and k are read and written."""
        kept = {"split": 2, "split8": 1}.get(self.compensation, 0)
        return self.dtype.itemsize + 2 * (2 * self.moment_bytes + self.dtype.itemsize + kept)


CODED = (
    Storage("compact", torch.bfloat16, "split8", coded=True),
    Storage("smallest", torch.bfloat16, "stochastic", coded=True),
)
STORAGES = (
    Storage("bf16", torch.bfloat16),
    Storage("fp32", torch.float32),
    Storage("split", torch.bfloat16, "split"),
    *CODED,
)


class Clock:
    """A CUDA event of a dry run."""

    def record(self) -> None:
        """Note the time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Clock) -> float:
        """Return the milliseconds until `end`."""
        return 1e3 * (end.seconds - self.seconds)


@dataclasses.dataclass
class Setting:
    """The device and its sizes. dry: the CPU with small sizes, few repetitions, and nothing of torch.cuda."""

    dry: bool

    @property
    def device(self) -> str:
        """The device of the parameters."""
        return "cpu" if self.dry else "cuda"

    def description(self) -> dict[str, Any]:
        """Return the device's name and properties."""
        if self.dry:
            return {"name": "cpu, Triton's interpreter", "multiprocessors": 2, "cache_bytes": 2**16}
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

    def few(self, count: int, dry: int = 1) -> int:
        """Return a number of repetitions: `count`, or `dry` in a dry run."""
        return dry if self.dry else count

    def first(self, rows: Any) -> list[Any]:
        """Return all rows, or the first one in a dry run."""
        return list(rows)[:1] if self.dry else list(rows)

    def parameters(self, numels: list[int], dtype: torch.dtype, *, coded: bool = False) -> list[nn.Parameter]:
        """Return seeded normal parameters with gradients of standard deviation 0.02; the same ones at each call.

        coded: large ones are matrices, whose moments can be in 8 bits.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        made = []
        for numel in numels:
            shape = matrix_of(numel) if coded else (numel,)
            made.append(nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=generator)))
            made[-1].grad = torch.empty_like(made[-1]).normal_(std=0.02, generator=generator)
        return made

    # -- the device -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def failure(self, error: Exception) -> str:
        """Return what went wrong; raise it if nothing works any more in this process, as after a bad access."""
        self.synchronize()
        return failure(error)

    def clean_up(self) -> None:
        """Free cached memory, including the filler's, so that it is not part of a peak measured later."""
        self.__dict__.pop("_filler", None)
        gc.collect(self.few(2, 0))
        if not self.dry:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start a new peak of allocated and of reserved bytes."""
        self.clean_up()
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """Return the largest numbers of allocated and reserved bytes since `reset_peak`."""
        if self.dry:
            return {"peak_allocated_bytes": 1, "peak_reserved_bytes": 1}
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    @contextlib.contextmanager
    def another_stream(self, *, wait: bool = True) -> Iterator[None]:
        """Make another stream current, which starts after what was launched. wait: what follows waits for it."""
        if self.dry:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        if wait:
            torch.cuda.current_stream().wait_stream(stream)

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a call in a CUDA graph and return its replay; in a dry run return the call."""
        if self.dry:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    # -- time -----------------------------------------------------------------------------------------------------------

    def device_ms(self, run: Callable[[], Any], repetitions: int = 20) -> float:
        """Return the median milliseconds that the device works on `run`.

        The device is kept busy before each run for longer than the host needs to launch it, as in a backward pass, so that
        the time does not include waiting for launches. This also empties the second-level cache.
        """
        for _ in range(self.few(3, 0)):
            run()
        taken = []
        for _ in range(self.few(repetitions)):
            start, end = self._clock(), self._clock()
            self.synchronize()
            for _ in range(self.few(8)):
                self._filler.copy_(self._filler.flip(0))
            start.record()
            run()
            end.record()
            self.synchronize()
            taken.append(start.elapsed_time(end))
        return statistics.median(taken)

    def wall_ms(self, run: Callable[[], Any], repetitions: int = 20) -> dict[str, float]:
        """Return the milliseconds of `run`, called repeatedly: in total, and until the host has launched it."""
        repetitions = self.few(repetitions)
        for _ in range(self.few(3, 0)):
            run()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(repetitions):
            run()
        launched = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        return {"back_to_back_ms": 1e3 * (done - started) / repetitions, "host_ms": 1e3 * (launched - started) / repetitions}

    def _clock(self) -> Any:
        return Clock() if self.dry else torch.cuda.Event(enable_timing=True)

    @functools.cached_property
    def _filler(self) -> Tensor:
        return torch.zeros(self.few(FILLER_BYTES), dtype=torch.uint8, device=self.device)

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a copy of 4 GiB of random numbers reads and writes: zeros are copied faster."""
        source = torch.randn(self.few(2**30, 2**12), device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / (1e-3 * self.device_ms(lambda: target.copy_(source)))


def matrix_of(numel: int) -> tuple[int, ...]:
    """Return the shape of a matrix with this number of elements, in whole blocks if possible; of a vector if it is small."""
    if numel < SMALLEST:
        return (numel,)
    columns = next(columns for columns in (2 * BLOCK, numel // 32, numel // 3, numel) if numel % columns == 0)
    return numel // columns, columns


# -- what sections compare ------------------------------------------------------------------------------------------------


def memory_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the parameters and their state, without step counts."""
    state = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, Tensor) and x.dim()]
    return [*(p.detach() for p in parameters), *state]


def restore(memory: list[Tensor], start: list[Tensor]) -> None:
    """Copy saved tensors back."""
    for x, saved in zip(memory, start, strict=True):
        x.copy_(saved)


def differing(memory: list[Tensor], expected: list[Tensor]) -> Tensor:
    """Return the number of elements that differ in any bit, 0-d."""
    return torch.stack([(_bits(x) != _bits(y)).sum() for x, y in zip(memory, expected, strict=True)]).sum()


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def update_alone(optimizer: Any, p: nn.Parameter) -> None:
    """Update one tensor as release does."""
    assert p.grad is not None
    slot = optimizer._slot(p)
    with torch.no_grad():
        optimizer._backend.update(slot, p.grad, first=True)
    count_updates((slot,))
