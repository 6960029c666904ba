"""What an engine of communication is: it takes local gradients and hands over averaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Communication(Protocol):
    """Averages gradients over processes, each as soon as it exists.

    name: the value of the axis "communication" in `core.combinations`.
    """

    name: str

    def attach(self, parameters: Sequence[Tensor], deliver: Callable[[Tensor], None]) -> None:
        """Know these parameters (in the optimizer's order), as well as those of earlier calls.

        `deliver(parameter)` is to be called with the averaged gradient in `.grad`; it frees it. It holds the release weakly.
        """
        ...

    def detach(self) -> None:
        """Undo `attach`: no hook is left, nothing is in flight."""
        ...

    def gradient_ready(self, parameter: Tensor) -> None:
        """The local gradient is in `.grad`: deliver it now, or later, once it is averaged."""
        ...

    def flush(self) -> None:
        """The end of a backward pass, or of what step() hands over: everything is delivered, and a new round begins.

        A parameter that was not handed over in this round on this process, but on another, takes part with what lies in its
        `.grad` (micro-batches held earlier), or with zeros. Without anything to do, it does nothing.
        """
        ...

    def sum_over_shards(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """values[i], a 0-d sum over the local part of parameters[i], summed over all parts, on every process."""
        ...
