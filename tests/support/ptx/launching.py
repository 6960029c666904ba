"""Lets the Triton backend run its kernels as they are compiled, on tensors on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu import no_launch
from triton.compiler import CompiledKernel

from penstock.torch_frontend.backends.triton import availability, configuration, devices

from .machine import Machine
from .memory import of_this_process
from .program import parsed

parsed_once = functools.cache(parsed)


@contextlib.contextmanager
def on_machine(*, programs: int = 2, resident: int = 0, seed: int = 0, altered: Callable[[str], str] = str) -> Iterator[None]:
    """Run every launch on a `Machine`, with the configurations for NVIDIA.

    Args:
        programs: of a launch with tickets, at most.
        resident: programs that run at once; 0 means all.
        seed: of the order in which warps run.
        altered: changes the assembly of a kernel.
    """
    kernels: dict[int, CompiledKernel] = {}

    def launcher(self: Any, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            kernel = kernels[id(source)]
            program = parsed_once(altered(kernel.asm["ptx"]))
            arguments = _arguments(source, given[no_launch.LAUNCH_SETTINGS :])
            arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own scratch memory, of which there is none
            settings = {"shared": kernel.metadata.shared, "resident": resident, "seed": seed}
            Machine(program, given[0], arguments, _tensors(), **settings).run()

        return launch

    init_handles, of = CompiledKernel._init_handles, configuration.Device.of

    def load(kernel: CompiledKernel) -> None:
        kernels[id(kernel.src)] = kernel
        init_handles(kernel)

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_launch.without_launching())
        for thing, name, new in (
            (no_launch.NoDevice, "launcher_cls", launcher),
            (CompiledKernel, "_init_handles", load),
            (availability, "interpreted", lambda: True),
            (devices, "interpreted", lambda: True),
            (configuration.Device, "of", lambda device: configuration.Device(1, of(device).cache_bytes)),
        ):
            stack.enter_context(mock.patch.object(thing, name, new))
        table = {kind: dataclasses.replace(chosen, programs=programs) for kind, chosen in configuration.TABLE.items()}
        stack.enter_context(mock.patch.dict(configuration.TABLE, table))
        yield


def _arguments(source: Any, given: tuple[Any, ...]) -> list[int | float]:
    """Return the values of the compiled kernel's parameters: what is given, without constants and with addresses."""
    pairs = zip(source.signature.values(), given, strict=True)
    values = [value for kind, value in pairs if kind != "constexpr" and value is not None]
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]


def _tensors() -> dict[int, Any]:
    """Return the memory of all tensors by addresses."""
    sizes = {}
    for kind in (torch.Tensor, torch.nn.Parameter):
        for tensor in (thing for thing in gc.get_objects() if type(thing) is kind and thing.device.type == "cpu"):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return {a: piece for start, size in sizes.items() if size for a, piece in of_this_process(start, size).items()}
