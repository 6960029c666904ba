"""One process: a gradient is its own average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .protocol import Deliver, Purpose


class LocalCommunication:
    """See `Communication`; the other engines differ from it where their name says."""

    name = "local"
    _deliver: Deliver

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        """See `Communication`."""
        self._deliver = deliver

    def detach(self) -> None:
        """See `Communication`."""

    def keeps(self) -> bool:
        """See `Communication`."""
        return False

    def held(self, parameter: Tensor) -> None:
        """See `Communication`."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """See `Communication`."""
        self._deliver([parameter])

    def flush(self, *, always: bool = False) -> None:
        """See `Communication`."""

    def average(self, parameters: Sequence[Tensor]) -> None:
        """See `Communication`."""

    def fail(self) -> None:
        """See `Communication`."""

    def end_step(self) -> None:
        """See `Communication`."""
