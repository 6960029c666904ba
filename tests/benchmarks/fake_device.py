"""The sections of the GPU script as on a GPU, which is pretended: kernels in the interpreter, fakes of torch.cuda.

    TRITON_INTERPRET=1 python -m tests.benchmarks.fake_device

Only sizes are changed, so every line that asks whether the run is dry takes the way of a device; `one_tensor`, `jax` and
`parity`, which do the same everywhere, are left out. Prints the results as JSON.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.gpu import laws, setting, speed
from benchmarks.gpu.sections import SECTIONS

from penstock.parity.backends.triton_interpreter import correct_interpreter
from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton.configuration import TABLE


class Event:
    """A time of the host."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


class Stream:
    """Whose work is done already; that another's was waited for is seen."""

    waited = False

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)
        self.waited = True


class Graph:
    """Remembers a call of step() instead of making it."""

    replay: Callable[[], None]


@contextlib.contextmanager
def captured(graph: Graph) -> Iterator[None]:
    original = StableAdamW.step
    StableAdamW.step = lambda self: setattr(graph, "replay", lambda: original(self))  # type: ignore[method-assign]
    yield
    StableAdamW.step = original  # type: ignore[method-assign]


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    assert stream.waited, "work on another stream begins before what it needs is there"
    yield


class Pretended(setting.Setting):
    """A setting on a device, with few repetitions."""

    device = "cpu"  # type: ignore[assignment]

    def few(self, count: int) -> int:
        return min(count, 1)

    def device_ms(self, run: Callable[[], Any], repetitions: int = 1) -> float:
        return super().device_ms(run, 1)

    def description(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            name="pretended", multi_processor_count=2, total_memory=1, L2_cache_size=2**16, major=9, minor=0
        )
        torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment]
        return super().description()


def main() -> None:
    correct_interpreter()
    fakes = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": captured, "stream": on_stream}
    fakes |= {"current_stream": Stream, "max_memory_allocated": lambda: 1}
    fakes |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    TABLE["cuda", None] = TABLE["cpu", None]
    setting.SHAPES.update(setting.DRY_SHAPES)
    setting.COPIED_ELEMENTS, setting.FILLER_BYTES = 2**12, 2**12
    laws.NUMELS[:] = laws.DRY_NUMELS
    laws.BEYOND = 1000
    speed.TRANSFORMER = (16, 2, 4, 2)
    speed.STORAGES = speed.STORAGES[2:]
    here = Pretended(dry=False)
    results: dict[str, Any] = {"device": here.description()}
    for name in ("soak", "bandwidth", "step_time", "graph", "release", "beyond_32_bits", "configurations"):
        started = time.perf_counter()
        results[name] = SECTIONS[name](here)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        here.clean_up()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
