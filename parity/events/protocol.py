"""The interface of a backend that runs event sequences; a backend with plain updates only does not need it."""

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
        """Return the parameters and states, by tensor name."""
        ...

    def updates(self) -> Mapping[str, int]:
        """Return the number of updates in each tensor's state."""
        ...

    def live_bytes(self) -> Sequence[int] | None:
        """Return the bytes of gradient alive, by each account (measured, ledger); None if they are not known."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A run that can be saved between two steps and continued in another run."""

    def save(self) -> bytes:
        """Return everything that later steps depend on."""
        ...

    def load(self, saved: bytes) -> None:
        """Continue from a saved state; called between two steps of another run of the same case."""
        ...


@runtime_checkable
class RunsEvents(Protocol):
    """A backend that runs event sequences.

    norm_eps: what clipping adds to the norm before it divides by it.
    """

    norm_eps: float

    def refuses_events(self, case: EventCase) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def start_events(self, case: EventCase) -> EventRun:
        """A new run."""
        ...
