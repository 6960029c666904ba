"""Triton without a device: kernels are compiled for a GPU and everything happens until they are launched; nothing is launched.

For tests of what is launched with which arguments, and for the time that the host takes. Tensors are on the CPU.
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

from penstock.torch_frontend.backends.triton import devices, kernels
from penstock.torch_frontend.backends.triton.configuration import TABLE

TARGET = GPUTarget("cuda", 90, 32)
LAUNCH_SETTINGS = 9
"""Positional arguments of a launcher before those of the kernel: grid, stream, function, metadata and hooks."""

REMEMBERED = 1000
"""Launches that are noted at most: a measurement makes many."""


class Launched(NamedTuple):
    """A launch that did not happen.

    source: what was compiled; by it the program is known.
    grid: numbers of programs.
    arguments: of the kernel, and in later versions of Triton its constants.
    """

    source: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Utilities:
    """What Triton asks of a driver to load a program."""

    launch = None

    def __init__(self) -> None:
        handles = inspect.getsource(CompiledKernel._init_handles)
        self._loaded = (1, 1, 64, 0, *((1024,) if "n_max_threads" in handles else ()))

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Module, function, registers, spills and, in later versions, threads at most."""
        return self._loaded

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Those of an H100 that matter."""
        return {"max_shared_mem": 232448}


class NoDevice:
    """A driver that notes launches in `launched`."""

    def __init__(self) -> None:
        self.launched: collections.deque[Launched] = collections.deque(maxlen=REMEMBERED)
        self.utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return TARGET

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """A launcher of a compiled kernel."""

        def launch(*given: Any) -> None:
            self.launched.append(Launched(source, given[:3], given[LAUNCH_SETTINGS:]))

        return launch


@contextlib.contextmanager
def without_launching() -> Iterator[collections.deque[Launched]]:
    """Note all launches of the kernels instead of making them. Programs are compiled afresh, or taken from Triton's files."""
    pretended = NoDevice()
    active = "_active" if hasattr(driver, "_active") else "active"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, active, pretended))
        stack.enter_context(mock.patch.object(devices, "on", contextlib.nullcontext))
        on_cpu = {("cpu", dtype): TABLE["cuda", dtype] for dtype in (None, torch.float64)}
        stack.enter_context(mock.patch.dict(TABLE, on_cpu))
        for kernel in (kernels.update_group, kernels.update_tensor):
            for name, fresh in _fresh_caches(kernel).items():
                stack.enter_context(mock.patch.object(kernel, name, fresh))
        yield pretended.launched


def _fresh_caches(kernel: Any) -> dict[str, Any]:
    """In which Triton looks for a compiled program; up to Triton 3.2 the binder of arguments is apart."""
    if hasattr(kernel, "device_caches"):
        return {"device_caches": collections.defaultdict(kernel.create_binder)}
    return {"cache": collections.defaultdict(dict), "binder": None}
