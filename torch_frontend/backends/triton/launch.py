"""Launches that are ready: whatever the host can find wrong was found before the first one writes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import UnsupportedTensor
from .availability import interpreted

Key = tuple[object, ...]


class Launch(NamedTuple):
    """A launch of a kernel, with all its memory.

    kernel: of `kernels`.
    device: that it runs on.
    programs: how many.
    arguments: of the kernel, in order; tensors, numbers and None.
    options: what is compiled in, and how.
    written: the parameters that it writes to.
    """

    kernel: Any
    device: torch.device
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    written: list[Tensor]

    def __call__(self) -> None:
        """Launch, on the current stream of the device, and tell autograd: a kernel leaves no trace of its own."""
        with on(self.device):
            self.kernel[(self.programs,)](*self.arguments, **self.options)
        if self.written:
            _increment_versions(self.written)

    def compile(self) -> None:
        """Compile and load, and launch nothing."""
        with on(self.device):
            program = self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)
            getattr(program, "run", None)  # which loads it

    @property
    def key(self) -> Key:
        """Equal for two launches only if Triton compiles both alike."""
        kinds = (
            (argument.dtype, argument.data_ptr() % 16 == 0) if isinstance(argument, Tensor) else type(argument)
            for argument in self.arguments
        )
        return (self.kernel, self.device, *self.options.values(), *kinds)


class Launcher:
    """Launches what is ready, as nearly as can be all or nothing.

    Of several launches none is made before all are compiled. What is left is a device that fails in between: of those
    errors, which are few, most leave no device to go on with.
    """

    def __init__(self) -> None:
        self._compiled: set[Key] = set()

    def __call__(self, launches: Sequence[Launch]) -> None:
        """Launch all in order."""
        if len(launches) > 1:
            for launch in launches:
                if (key := launch.key) not in self._compiled:
                    launch.compile()
                    self._compiled.add(key)
        for launch in launches:
            launch()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; that is made the tensor's own.

    Raises:
        UnsupportedTensor: a parameter is (added, or moved since the optimizer was constructed) where no kernel can run.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if not interpreted():
        raise UnsupportedTensor(
            f"backend='triton' cannot update a parameter on {device}; move the model to a CUDA device, or construct the "
            "optimizer anew with backend='auto'."
        )
    return contextlib.nullcontext()


def _increment_versions(parameters: list[Tensor]) -> None:
    try:
        torch.autograd.graph.increment_version(parameters)
    except TypeError:  # an older version takes one at a time
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
