"""What a backend has to have so that it trains the model: two further methods."""

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
    """A backend that trains the model. Optimizers of users need not have it."""

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        """Why it does not run this case (a sentence), or None when it does."""
        ...

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        """The model before its first step."""
        ...
