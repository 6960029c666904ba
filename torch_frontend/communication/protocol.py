"""What an engine of communication is: it takes local gradients and hands over averaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

BUCKET_BYTES = 2**20
"""Most bytes of small gradients that are reduced and delivered together."""

Deliver = Callable[[Sequence[Tensor]], None]
"""Takes parameters with their averaged gradients in `.grad`, uses the gradients, and frees them.

Those of one call may share an exchange with other processes, so every process must deliver the same ones together.
"""


class Purpose(NamedTuple):
    """What a round is for; it must be the same on every process, or their gradients do not belong together.

    measured: gradients are looked at, and not used. last: parameters are updated. first: no micro-batch of the same update
    came before.
    """

    measured: bool
    last: bool
    first: bool


class Communication(Protocol):
    """Averages gradients over processes, each as soon as it exists, in rounds: a backward pass is one.

    name: the value of the axis "communication" in `core.combinations`.
    """

    name: str

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        """Know these parameters, as well as those of earlier calls. `purpose` tells what a round that begins now is for."""
        ...

    def detach(self) -> None:
        """Undo `attach`: no hook is left, nothing is in flight."""
        ...

    def keeps(self) -> bool:
        """Whether the gradients of this pass stay local, because the engine only adds them up now."""
        ...

    def held(self, parameter: Tensor) -> None:
        """The local gradient stays in `.grad` for now; a later round, or `average`, takes it from there."""
        ...

    def gradient_ready(self, parameter: Tensor) -> None:
        """The local gradient is in `.grad`: deliver it now, or later in this round, once it is averaged."""
        ...

    def flush(self, *, always: bool = False) -> None:
        """The round ends: what was not delivered yet is.

        A parameter that was not handed over in this round on this process, but on another, takes part with what lies in its
        `.grad`, or with zeros.

        Args:
            always: a pass has ended in which every process took part, although this one may have had no gradient at all.
        """
        ...

    def average(self, parameters: Sequence[Tensor]) -> None:
        """step(), once: averages in place what is held in `.grad` of these parameters, and of those that others name."""
        ...

    def fail(self) -> None:
        """The pass that runs, or ran last, has failed on this process: the rest of its round is used on none.

        Every process learns of it: the round is ended when anything else is asked of the engine.
        """
        ...

    def end_step(self) -> None:
        """The step is closed, by step() or zero_grad()."""
        ...
