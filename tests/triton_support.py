"""What the tests of the kernels share: a look at what is launched and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from penstock.torch_frontend.backends.triton.launch import Program


@contextlib.contextmanager
def watched(launch: Callable[[str], Any], compile: Callable[[str], Any] = str) -> Iterator[None]:
    """Call these with the name of a kernel before it is launched, or compiled."""
    originals = {"__call__": (Program.__call__, launch), "load": (Program.load, compile)}
    with contextlib.ExitStack() as stack:
        for name, (original, tell) in originals.items():

            def watching(program: Program, *given: Any, original: Any = original, tell: Any = tell) -> None:
                tell(program.kernel.__name__)
                original(program, *given)

            stack.enter_context(mock.patch.object(Program, name, watching))
        yield
