"""What one release consists of, and what its events share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...core.errors import PenstockError
from ...core.release import Status
from ..communication import Communication
from ..communication.protocol import Deliver, Purpose
from ..optimizers import ReleasableOptimizer
from .arrivals import Arrivals
from .conditioning import Conditioning
from .held_average import HeldAverage
from .hooks import Hooks
from .launches import Launches
from .lifecycle import Lifecycle
from .measurement import Measurement
from .nonfinite import NonFinite
from .settings import Settings


@dataclasses.dataclass
class Parts:
    """See the class of each.

    deliver: where communication hands averaged gradients over; purpose: what for. Neither keeps a release alive.
    lock: autograd runs the hooks of several devices in several threads.
    measurement: there while a pass only measures.
    """

    optimizer: ReleasableOptimizer
    hooks: Hooks
    communication: Communication
    arrivals: Arrivals
    lifecycle: Lifecycle
    settings: Settings
    conditioning: Conditioning
    held_average: HeldAverage
    nonfinite: NonFinite
    launches: Launches
    deliver: Deliver
    purpose: Callable[[], Purpose]
    lock: contextlib.AbstractContextManager[Any]
    measurement: Measurement | None = None

    def attach(self) -> None:
        """See `Release.attach`."""
        fresh = self.hooks.attach(p for group in self.optimizer.param_groups for p in group["params"])
        if fresh:
            self.launches.attach(self.hooks.parameters)
            self.communication.attach(fresh, self.deliver, self.purpose)

    @property
    def alone(self) -> bool:
        """Whether no other process uses the same gradients: then those that were not used yet need not be."""
        return self.communication.name == "local"

    def finish_round(self, *, always: bool = False) -> None:
        """What waits, for other processes or for a launch, is used."""
        self.communication.flush(always=always)
        self.launches.flush()

    def end_failed_pass(self) -> None:
        """If a pass that updates parameters never came to its end, say so to other processes."""
        if self.arrivals.watched is not None:
            self.arrivals.watched = None
            self.communication.fail()
            self.arrivals.end_pass()
            self.lifecycle.book_out()

    @property
    def released(self) -> bool:
        """Whether a parameter was updated in this step, or is about to be."""
        updated = (Status.RELEASED, Status.QUEUED)
        return any(self.lifecycle.status(parameter) in updated for parameter in self.lifecycle.tensors())

    @contextlib.contextmanager
    def turning_away(self, came: Iterable[Tensor] = ()) -> Iterator[None]:
        """If a gradient is refused in this context, nothing of its backward is left to be used; `came`: it lies in `.grad`."""
        try:
            yield
        except PenstockError:
            for parameter in came:
                self.lifecycle.turn_away(parameter)
            if self.alone:  # otherwise what is under way is under way on other processes as well
                self.launches.discard_pass()
                self.lifecycle.book_out()
            raise

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Free their gradients unused."""
        for parameter in list(parameters):
            self.lifecycle.free(parameter)
