"""The backend "jax": `penstock.jax_frontend` transforms under `make_update`, jitted and donated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cases import Case
from .jax_arguments import Recipe, arrays_of, held_of, precision, transform_name
from .protocol import Held

if TYPE_CHECKING:
    from ..codings import CodingCase, CodingRun
    from ..events import EventCase, EventRun
    from ..trajectories import Trajectory, TrajectoryRun


@functools.lru_cache(maxsize=64)  # cases that differ in their gradients only share what is compiled
def _transform_and_update(recipe: Recipe) -> tuple[Any, Any]:
    from ... import jax_frontend

    tx = recipe.transform()
    return tx, jax_frontend.make_update(tx)


class JaxRun:
    """A transform and its jitted update."""

    def __init__(self, case: Case) -> None:
        import jax.numpy as jnp

        problem = case.problem
        self.dtype = problem.dtype
        tx, self.update = _transform_and_update(Recipe.of(case))
        with precision(self.dtype):
            # copies: a donated array must not be numpy's own memory
            self.parameters = {name: jnp.array(value) for name, value in problem.initial_parameters().items()}
            self.state = tx.init(self.parameters)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        import jax.numpy as jnp

        with precision(self.dtype):
            given = {name: jnp.array(gradient) for name, gradient in gradients.items()}
            self.parameters, self.state = self.update(given, self.state, self.parameters)

    def held(self) -> dict[str, Held]:
        return held_of(self.parameters, self.state)

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Return its JAX arrays by tensor, then by field of `Held`."""
        return arrays_of(self.parameters, self.state)


class JaxBackend:
    """The backend "jax"."""

    name = "jax"
    norm_eps = 0.0
    flushes_subnormals = True  # XLA does, on a CPU
    abilities = frozenset({"schedules", "groups", "decoupled decay", "changing betas"})

    def unavailable(self) -> str | None:
        try:
            from ... import jax_frontend  # noqa: F401
        except ImportError as error:
            return str(error)
        return None

    def refuses(self, case: Case) -> str | None:
        from ... import jax_frontend

        rule = transform_name(case.problem.rule)
        return None if hasattr(jax_frontend, rule) else f"the JAX frontend has no {rule}"

    def start(self, case: Case) -> JaxRun:
        return JaxRun(case)

    def refuses_events(self, case: EventCase) -> str | None:
        from ..events.jax_steps import refusal

        return refusal(case, walk=False)

    def start_events(self, case: EventCase) -> EventRun:
        from ..events.jax_steps import JaxEvents

        return JaxEvents(case, walk=False)

    def refuses_codings(self, case: CodingCase) -> str | None:
        return "only make_release_step puts micro-batches into the state" if case.micro_batches > 1 else None

    def start_codings(self, case: CodingCase) -> CodingRun:
        from ..codings.jax_runs import UpdateCodings

        return UpdateCodings(case)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        if case.mode == "release":
            return "an unrolled model needs no gradient release: XLA frees its gradients in the plain step"
        if case.mode == "state":
            return "only make_release_step puts micro-batches into the moments"
        return case.program_skipped(self.name)

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        from ..trajectories.jax_runs import UnrolledTrajectory

        return UnrolledTrajectory(case)
