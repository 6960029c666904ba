"""Programs that Triton has compiled, and launches of them that are ready: the host finds what is wrong before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import devices


class Program:
    """A kernel with everything that is compiled into it, launched without Triton's front end.

    `kernel[grid](...)` binds and specialises all arguments again at every launch, which takes 24 to 38 us, and then launches
    a `triton.compiler.CompiledKernel`. That object is kept here and launched directly; every address and size is an argument
    of the launch. In the interpreter, and with a Triton whose compiled kernels cannot be launched so, `kernel[grid]` is used.

    Args:
        kernel: of `kernels`; its constants come last.
        options: by name, the constants, and how Triton compiles.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: Any = None
        self.loaded = False
        self._constants: tuple[Any, ...] = ()

    def load(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Compile, and load onto the current device; nothing is launched."""
        if hasattr(self.kernel, "warmup"):  # it is not in the interpreter of Triton 3.2, which has nothing to compile
            compiled = self.kernel.warmup(*arguments, grid=(programs,), **self.options)
            getattr(compiled, "run", None)  # Triton loads it when this is read
            constants = constants_taken(compiled, self.kernel.arg_names, len(arguments), self.options)
            if constants is not None:
                self.compiled, self._constants = compiled, constants
        self.loaded = True

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch so many programs on the current stream of the current device."""
        if self.compiled is None:
            self.kernel[(programs,)](*arguments, **self.options)
        else:
            self.compiled[(programs, 1, 1)](*arguments, *self._constants)


def constants_taken(compiled: Any, names: list[str], given: int, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a compiled kernel takes after the arguments: nothing in Triton 3.2, in later versions every constant.

    Args:
        compiled: what Triton's `warmup` returned.
        names: of the kernel's parameters, constants last.
        given: how many of them are arguments.
        options: by name, the constants.

    Returns:
        None if it is nothing that can be launched by itself.
    """
    signature = getattr(getattr(compiled, "src", None), "signature", None)
    if signature is None or not hasattr(type(compiled), "__getitem__"):
        return None
    if len(signature) == len(names):
        return tuple(options[name] for name in names[given:])
    return () if len(signature) == given else None


class Launch(NamedTuple):
    """A launch with all its memory.

    program: what runs.
    device: that it runs on.
    programs: how many instances.
    arguments: of the kernel, in order, without its constants; tensors, numbers and None.
    written: the parameters that it writes to.
    """

    program: Program
    device: torch.device
    programs: int
    arguments: tuple[Any, ...]
    written: list[Tensor]

    def load(self) -> None:
        """Compile and load the program, unless that is done, on the current device."""
        if not self.program.loaded:
            self.program.load(self.programs, self.arguments)

    def __call__(self) -> None:
        """Launch on the current device, and tell autograd: a kernel leaves no trace of its own."""
        self.program(self.programs, self.arguments)
        if self.written:
            _increment_versions(self.written)


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch all in order, as nearly as can be all or nothing: none before all programs are compiled and loaded.

    What is left is a device that fails in between: of those errors, which are few, most leave no device to go on with.
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
