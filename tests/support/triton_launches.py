"""Launches that are not made, compared with what Triton's own front end would launch. No GPU, no driver."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.gpu.no_launch import Launched, without_launching
from torch import Tensor

from penstock.torch_frontend.backends.triton.launch import Program


class Compared:
    """Launches that were noted, each as Triton's own front end would have made it."""

    def __init__(self, launched: deque[Launched]) -> None:
        self.launched = launched
        self.by: list[Program] = []

    def clear(self) -> None:
        """Forget them."""
        self.launched.clear()
        self.by.clear()

    @property
    def aligned(self) -> list[tuple[Launched, int]]:
        """Each with the alignment that its program relies on."""
        return [(made, program.options["ALIGNMENT"]) for made, program in zip(self.launched, self.by, strict=True)]

    def programs(self, kernel: str) -> int:
        """How many different ones of a kernel were launched."""
        return len({id(program.compiled) for program in self.by if program.kernel.__name__ == kernel})


@contextlib.contextmanager
def compared() -> Iterator[Compared]:
    """Note launches and make none; of each, that `kernel[grid](...)` would launch the same program with the same arguments."""
    original = Program.__call__
    with without_launching() as launched:
        found = Compared(launched)

        def compare(program: Program, programs: int, arguments: tuple[Any, ...]) -> None:
            original(program, programs, arguments)
            ours = launched[-1]
            triton_s = program.kernel[(programs,)](*arguments, **program.options)
            theirs = launched.pop()
            assert triton_s is program.compiled, "Triton would launch another program"
            assert theirs.source is ours.source
            assert theirs.grid == ours.grid
            assert len(theirs.arguments) == len(ours.arguments)
            assert all(map(_same, theirs.arguments, ours.arguments))
            found.by.append(program)

        with mock.patch.object(Program, "__call__", compare):
            yield found


def _same(one: Any, other: Any) -> bool:
    return one is other if isinstance(one, Tensor) else one == other


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
