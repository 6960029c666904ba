"""The interface of a backend that trains the model: two further methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from ..backends.protocol import Held
from .cases import Trajectory


class TrajectoryRun(Protocol):
    """The model in training, from `cases.start` on.

    norm_eps: what is added to the norm of the gradient before max_norm is divided by it.
    """

    norm_eps: float

    def step(self, batch: np.ndarray) -> None:
        """One update, on int32 tokens, [batch, context + 1]."""
        ...

    def held(self) -> Mapping[str, Held]:
        """What the run holds now, by the names of the initialisation."""
        ...


@runtime_checkable
class RunsTrajectories(Protocol):
    """A backend that trains the model; registered optimizers do not need it."""

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        """Return why it does not run this case, or None if it does."""
        ...

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        """Return a run of the model before its first step."""
        ...
