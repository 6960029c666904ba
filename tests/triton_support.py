"""What the tests of the kernels share: a look at what is launched and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from penstock.torch_frontend.backends.triton import kernels


class Watched:
    """Stands for a kernel, and tells its name whenever it is launched, or only compiled."""

    def __init__(self, name: str, launch: Callable[[str], Any], compile: Callable[[str], Any]) -> None:
        self._kernel = getattr(kernels, name)
        self._launch, self._compile = (lambda: launch(name)), (lambda: compile(name))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launch()
        return self._kernel[grid]

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        self._compile()
        return self._kernel.warmup(*arguments, **options)


@contextlib.contextmanager
def watched(launch: Callable[[str], Any], compile: Callable[[str], Any] = str) -> Iterator[None]:
    """Call these before a kernel is launched, or compiled."""
    with contextlib.ExitStack() as stack:
        for name in ("update_group", "update_tensor"):
            stack.enter_context(mock.patch.object(kernels, name, Watched(name, launch, compile)))
        yield
