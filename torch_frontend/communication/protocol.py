"""The interface of communication: it takes local gradients, averages them over processes, and delivers the averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

BUCKET_BYTES = 2**20
"""Most bytes of small gradients that are reduced and delivered together."""

Deliver = Callable[[Sequence[Tensor]], None]
"""Called with parameters whose averaged gradients are in `.grad`; uses the gradients and frees them.

One call may exchange numbers with other processes, so every process must deliver the same parameters together.
"""


class RoundKind(NamedTuple):
    """What a round does. It must be the same on every process, or their gradients do not belong together.

    Attributes:
        measured: gradients are measured, and not used.
        last: parameters are updated.
        first: the round is the first micro-batch of its update.
    """

    measured: bool
    last: bool
    first: bool


class Communication(Protocol):
    """Averages gradients over processes as soon as they exist, in rounds; a backward pass is one round.

    Attributes:
        name: value of the axis "communication" in `core.combinations`.
    """

    name: str

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, round_kind: Callable[[], RoundKind]) -> None:
        """Average the gradients of these parameters, too.

        Args:
            parameters: in addition to those of earlier calls.
            deliver: called with averaged gradients.
            round_kind: returns the kind of a round that begins now.
        """
        ...

    def detach(self) -> None:
        """Undo `attach`: remove hooks, and wait for collectives that are running."""
        ...

    def accumulates_locally(self) -> bool:
        """Whether the gradients of this pass only add up on each process, as inside no_sync()."""
        ...

    def gradient_held(self, parameter: Tensor) -> None:
        """Record that the local gradient stays in `.grad`, from where a later round or `average` takes it."""
        ...

    def gradient_ready(self, parameter: Tensor) -> None:
        """Take the local gradient from `.grad`, and deliver its average now or later in this round."""
        ...

    def flush(self, *, always: bool = False) -> None:
        """End the round, and deliver the rest.

        A parameter that has had a gradient in this round only on other processes takes part with its `.grad`, or with zeros.

        Args:
            always: every process took part in the pass, although this one may have had no gradient.
        """
        ...

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Average in place the gradients held in `.grad`, of these parameters and of those that other processes name."""
        ...

    def fail(self) -> None:
        """Record that the last pass has failed on this process: no process uses the rest of its round.

        The other processes learn of it when the round ends, with the next call of any method.
        """
        ...

    def has_failed_elsewhere(self) -> bool:
        """Whether another process has failed in the last pass, of which this one was not told. It may synchronise."""
        ...

    def end_step(self) -> None:
        """Record that step() or zero_grad() has ended the step."""
        ...
