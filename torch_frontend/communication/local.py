"""One process: a gradient is its own average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class LocalCommunication:
    """See `Communication`."""

    name = "local"
    _deliver: Callable[[Tensor], None]

    def attach(self, parameters: Sequence[Tensor], deliver: Callable[[Tensor], None]) -> None:
        """See `Communication`."""
        self._deliver = deliver

    def detach(self) -> None:
        """See `Communication`."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """See `Communication`."""
        self._deliver(parameter)

    def flush(self) -> None:
        """See `Communication`."""

    def sum_over_shards(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """See `Communication`."""
        return list(values)
