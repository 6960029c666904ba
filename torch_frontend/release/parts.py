"""What one release consists of, and what its events share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...core.release import Status
from ..communication import Communication
from ..communication.protocol import Deliver
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

    deliver: where communication hands averaged gradients over; it keeps no release alive.
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
    lock: contextlib.AbstractContextManager[Any]
    measurement: Measurement | None = None

    def attach(self) -> None:
        """See `Release.attach`."""
        fresh = self.hooks.attach(p for group in self.optimizer.param_groups for p in group["params"])
        if fresh:
            self.launches.attach(self.hooks.parameters)
            self.communication.attach(fresh, self.deliver)

    @property
    def alone(self) -> bool:
        """Whether no other process uses the same gradients: then those that were not used yet need not be."""
        return self.communication.name == "local"

    def finish_round(self, *, always: bool = False) -> None:
        """What waits, for other processes or for a launch, is used."""
        self.communication.flush(always=always)
        self.launches.flush()

    @property
    def released(self) -> bool:
        """Whether a parameter was updated in this step, or is about to be."""
        updated = (Status.RELEASED, Status.QUEUED)
        return any(self.lifecycle.status(parameter) in updated for parameter in self.lifecycle.tensors())

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Free their gradients unused."""
        for parameter in list(parameters):
            self.lifecycle.free(parameter)
