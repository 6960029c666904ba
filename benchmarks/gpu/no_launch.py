"""Triton without a device: kernels are compiled for a GPU, and launches are recorded instead of made.

For tests of launches and their arguments. Tensors are on the CPU.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from penstock.torch_frontend.backends.triton import corrections, devices, kernels
from penstock.torch_frontend.backends.triton.configuration import TABLE

TARGET = GPUTarget("cuda", 90, 32)
LAUNCH_SETTINGS = 9
"""Number of a launcher's arguments before those of the kernel: grid, stream, function, metadata and hooks."""

RECORDED = 1000
"""Largest number of launches that are recorded."""


class Launched(NamedTuple):
    """A recorded launch.

    source: the source of the compiled program, which identifies it.
    grid: numbers of programs.
    arguments: of the kernel, and in later versions of Triton its constants.
    """

    source: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Utilities:
    """The functions of a driver with which Triton loads a program."""

    launch = None

    def __init__(self) -> None:
        handles = inspect.getsource(CompiledKernel._init_handles)
        self._loaded = (None, 1, 64, 0, *((1024,) if "n_max_threads" in handles else ()))

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int | None, ...]:
        """Return module (None, so that no driver is asked to unload it), function, registers, spills and, in later versions,
        the largest number of threads."""
        return self._loaded

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties of an H100 that Triton reads."""
        return {"max_shared_mem": 232448}


class NoDevice:
    """A driver that records launches in `launched`."""

    def __init__(self) -> None:
        self.launched: collections.deque[Launched] = collections.deque(maxlen=RECORDED)
        self.utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return TARGET

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the number of the default stream."""
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a launcher of a compiled kernel."""

        def launch(*given: Any) -> None:
            self.launched.append(Launched(source, given[:3], given[LAUNCH_SETTINGS:]))

        return launch


@contextlib.contextmanager
def without_launching() -> Iterator[collections.deque[Launched]]:
    """Record all launches of the kernels instead of making them; programs are compiled, or loaded from Triton's cache."""
    pretended = NoDevice()
    active = "_active" if hasattr(driver, "_active") else "active"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, active, pretended))
        stack.enter_context(mock.patch.object(devices, "on", contextlib.nullcontext))
        on_cpu = {("cpu", dtype): TABLE["cuda", dtype] for dtype in (None, torch.float64)}
        stack.enter_context(mock.patch.dict(TABLE, on_cpu))
        for kernel in (kernels.update_group, kernels.update_tensor, corrections.store_bias_corrections):
            for name, fresh in _fresh_caches(kernel).items():
                stack.enter_context(mock.patch.object(kernel, name, fresh))
        yield pretended.launched


def _fresh_caches(kernel: Any) -> dict[str, Any]:
    """Return empty caches of compiled programs by attribute; up to Triton 3.2 the argument binder is an attribute too."""
    if hasattr(kernel, "device_caches"):
        return {"device_caches": collections.defaultdict(kernel.create_binder)}
    return {"cache": collections.defaultdict(dict), "binder": None}
