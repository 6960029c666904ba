"""The section "trajectories": a small transformer, trained in both frameworks from one initialisation.

Every run is compared with one truth: float64 gradients of the model, fed into `core.reference`.
"""

from .cases import Trajectory
from .protocol import RunsTrajectories, TrajectoryRun
from .section import Trajectories

__all__ = ["RunsTrajectories", "Trajectories", "Trajectory", "TrajectoryRun"]
