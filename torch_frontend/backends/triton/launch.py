"""Compiled Triton programs, and prepared launches of them: all are compiled and loaded before the first one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import devices
from .configuration import Device, resident_programs


class Program:
    """A kernel with its constants, launched without Triton's front end.

    `kernel[grid](...)` binds and specialises all arguments again at every launch, which takes 24 to 38 us, and then launches
    a `triton.compiler.CompiledKernel`. That object is cached here and launched directly; every address and size is an
    argument of the launch. `kernel[grid]` is used in the interpreter, and if this Triton cannot launch compiled kernels so.

    Args:
        kernel: of `kernels`; its constants are its last parameters.
        options: by name, the constants and Triton's compilation options.

    Attributes:
        resident: once it is loaded, the number of programs that a multiprocessor has room for at once.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: Any = None
        self.loaded = False
        self.resident = 1
        self._constants: tuple[Any, ...] = ()

    def load(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Compile the kernel and load it onto the current device, without launching it."""
        if hasattr(self.kernel, "warmup"):  # Triton 3.2's interpreter has none, and nothing to compile
            compiled = self.kernel.warmup(*arguments, grid=(programs,), **self.options)
            getattr(compiled, "run", None)  # Triton loads the kernel when this attribute is read
            registers = getattr(compiled, "n_regs", None) or 255
            self.resident = resident_programs(registers, self.options["num_warps"])
            constants = constants_taken(compiled, self.kernel.arg_names, len(arguments), self.options)
            if constants is not None:
                self.compiled, self._constants = compiled, constants
        self.loaded = True

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch `programs` instances on the current stream of the current device."""
        if self.compiled is None:
            self.kernel[(programs,)](*arguments, **self.options)
        else:
            self.compiled[(programs, 1, 1)](*arguments, *self._constants)


def constants_taken(compiled: Any, names: list[str], given: int, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the constants that a compiled kernel takes after the arguments: in Triton 3.2 those that are None, later all.

    Args:
        compiled: what Triton's `warmup` returned.
        names: of the kernel's parameters, constants last.
        given: the number of parameters that are arguments.
        options: the constants, by name.

    Returns:
        None if the compiled kernel cannot be launched directly.
    """
    signature = getattr(getattr(compiled, "src", None), "signature", None)
    if signature is None or not hasattr(type(compiled), "__getitem__") or not all(name in signature for name in names[:given]):
        return None
    return tuple(options[name] for name in names[given:] if name in signature)


class Launch(NamedTuple):
    """A launch whose memory is allocated.

    program: the program to run.
    device: the device to run it on.
    programs: the number of instances; with tickets the largest useful one.
    each: None without tickets; otherwise the number of instances on each multiprocessor, or 0 for as many as it has room for.
    arguments: the kernel's arguments in order, without constants; tensors, numbers and None.
    written: the parameters that the launch writes to.
    """

    program: Program
    device: torch.device
    programs: int
    each: int | None
    arguments: tuple[Any, ...]
    written: list[Tensor]

    def load(self) -> None:
        """Compile and load the program on the current device, if it is not loaded yet."""
        if not self.program.loaded:
            self.program.load(self.programs, self.arguments)

    def __call__(self) -> None:
        """Launch on the current device, and increment the parameters' version counters, which a kernel does not do."""
        programs = self.programs
        if self.each is not None:
            programs = min(programs, Device.of(self.device).multiprocessors * (self.each or self.program.resident))
        self.program(programs, self.arguments)
        if self.written:
            _increment_versions(self.written)


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch all in order, after all programs are compiled and loaded.

    So a compilation error occurs before anything is written. A device that fails between two launches may still leave some
    parameters updated.
    """
    for launch in launches:
        with devices.on(launch.device):
            launch.load()
    for launch in launches:
        with devices.on(launch.device):
            launch()


def _increment_versions(parameters: list[Tensor]) -> None:
    try:
        torch.autograd.graph.increment_version(parameters)
    except TypeError:  # an older version takes one at a time
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
