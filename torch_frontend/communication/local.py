"""One process: a gradient is its own average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .protocol import Deliver, Purpose


class LocalCommunication:
    """`Communication` of one process; the other engines differ from it where their name says."""

    name = "local"
    _deliver: Deliver

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        self._deliver = deliver

    def detach(self) -> None:
        pass

    def keeps(self) -> bool:
        return False

    def held(self, parameter: Tensor) -> None:
        pass

    def gradient_ready(self, parameter: Tensor) -> None:
        self._deliver([parameter])

    def flush(self, *, always: bool = False) -> None:
        pass

    def average(self, parameters: Sequence[Tensor]) -> None:
        pass

    def fail(self) -> None:
        pass

    def end_step(self) -> None:
        pass
