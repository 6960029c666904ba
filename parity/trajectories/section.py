"""The section: every trajectory on every backend that trains models."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from ..backends.calls import FAILURES, reason
from ..backends.protocol import Backend
from ..bounds import spacing
from ..compare import Finding, Refusal, Row, against, failed_from
from ..progress import Progress
from .cases import Trajectory, batches, flatten, trajectories
from .protocol import RunsTrajectories, TrajectoryRun

QUANTITIES = ("parameter", "exp_avg", "exp_avg_sq")


class Trajectories:
    """The section "trajectories" of the suite."""

    name = "trajectories"
    title = "A small transformer in training, in both frameworks from one initialisation, against float64"

    def cases(self, *, quick: bool) -> Sequence[Trajectory]:
        return trajectories(quick=quick)

    def run(
        self, backends: Sequence[Backend], cases: Sequence[Trajectory], steps: Sequence[int], progress: Progress
    ) -> Iterator[Finding]:
        """The cases know their numbers of steps."""
        for case in cases:
            reasons = {backend.name: _refusal(backend, case) for backend in backends}
            progress(case.name, "reference")
            if not all(reasons.values()):
                from .rounding import bounds

                bounds(case)
            for backend in backends:
                progress(case.name, backend.name)
                why = reasons[backend.name]
                if why is not None:
                    yield Refusal(case.name, backend.name, why)
                else:
                    yield from run_case(backend, case)


def _refusal(backend: Backend, case: Trajectory) -> str | None:
    if not isinstance(backend, RunsTrajectories):
        return "it trains no models (`RunsTrajectories`)"
    return reason(backend, "refuses_trajectory", case)


def run_case(backend: Backend, case: Trajectory) -> list[Row]:
    """Run one case on one backend. An error becomes a broken row, and the suite continues."""
    found: list[Row] = []
    step = 0
    try:
        assert isinstance(backend, RunsTrajectories)
        running = backend.start_trajectory(case)
        for step in range(1, max(case.step_counts) + 1):
            running.step(batches().batch(step))
            if step in case.step_counts:
                found += _rows(backend.name, case, step, running)
    except FAILURES as error:
        found += failed_from(case.name, backend.name, case.step_counts, found, error, at=f"step {step}")
    return found


def _rows(backend: str, case: Trajectory, step: int, running: TrajectoryRun) -> Iterator[Row]:
    from .rounding import bounds
    from .truth import truth

    held, true, bound = running.held(), truth(case, running.norm_eps)[step], bounds(case)[step]
    unit = functools.partial(spacing, case.dtype)
    for quantity in QUANTITIES:
        value = flatten({name: getattr(tensor, quantity) for name, tensor in held.items()})
        yield against(case.name, backend, step, quantity, value, true[quantity], bound[quantity], unit)
