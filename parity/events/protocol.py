"""What a backend shows of itself that can run whole event sequences; one that has only plain updates needs none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ..backends.protocol import Held
from .recorded import Event, EventCase


class EventRun(Protocol):
    """One event case on one backend, from its initial parameters on."""

    def run(self, event: Event) -> None:
        """The next event of the case's sequence; the gradients of the n-th pass are `case.gradients(n, event)`."""
        ...

    def held(self) -> Mapping[str, Held]:
        """What the run holds now, by tensor name."""
        ...

    def updates(self) -> Mapping[str, int]:
        """How many updates each tensor has had, as its state says."""
        ...

    def live_bytes(self) -> Sequence[int] | None:
        """Bytes of gradient alive now, by every account there is of them (measured, booked); None where nobody can tell."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A run that can be saved between two steps, and goes on in another one as if it had been that one."""

    def save(self) -> bytes:
        """Everything that the steps to come depend on."""
        ...

    def load(self, saved: bytes) -> None:
        """Go on from there: called between two steps, on another run of the same case, which may have made steps of its own."""
        ...


@runtime_checkable
class RunsEvents(Protocol):
    """A backend that runs event sequences.

    norm_eps: what clipping adds to the norm before it divides by it.
    """

    norm_eps: float

    def refuses_events(self, case: EventCase) -> str | None:
        """Why it does not run this case (a sentence), or None when it does."""
        ...

    def start_events(self, case: EventCase) -> EventRun:
        """A new run."""
        ...
