"""One process: a gradient is its own average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .protocol import Deliver, RoundKind


class LocalCommunication:
    """`Communication` of one process, and the base of the others: methods that have nothing to do are inherited."""

    name = "local"
    _deliver: Deliver

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, round_kind: Callable[[], RoundKind]) -> None:
        self._deliver = deliver

    def detach(self) -> None:
        pass

    def accumulates_locally(self) -> bool:
        return False

    def gradient_held(self, parameter: Tensor) -> None:
        pass

    def gradient_ready(self, parameter: Tensor) -> None:
        self._deliver([parameter])

    def flush(self, *, always: bool = False) -> None:
        pass

    def average(self, parameters: Sequence[Tensor]) -> None:
        pass

    def fail(self) -> None:
        pass

    def has_failed_elsewhere(self) -> bool:
        return False

    def end_step(self) -> None:
        pass
