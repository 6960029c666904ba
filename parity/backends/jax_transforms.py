"""The backend "jax": `penstock.jax_frontend` transforms under `make_update`, jitted and donated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.hyperparameters import Hyperparameters
from ...core.rules import Rule
from ..cases import Case, Storage
from .protocol import Held

if TYPE_CHECKING:
    from ..trajectories import Trajectory, TrajectoryRun


def transform_of(rule: Rule, given: Hyperparameters, storage: Storage) -> Any:
    """The transform of a case."""
    from ... import jax_frontend

    transform: Any = getattr(jax_frontend, rule.name)
    return transform(
        given.learning_rate,
        b1=given.beta1,
        b2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        mu_dtype=storage.state_dtype,
        nu_dtype=storage.state_dtype,
        compensation=storage.compensation,
    )


@functools.lru_cache(maxsize=64)  # cases that differ in their gradients only share what is compiled
def _transform_and_update(rule: Rule, given: Hyperparameters, storage: Storage) -> tuple[Any, Any]:
    from ... import jax_frontend

    tx = transform_of(rule, given, storage)
    return tx, jax_frontend.make_update(tx)


def held_of(parameters: Mapping[str, Any], state: Any) -> dict[str, Held]:
    """What parameters by name and the state of their transform are, in numpy."""
    adam = _adam_state(state)
    held = {}
    for name, parameter in parameters.items():
        kept = None if adam.compensation is None else adam.compensation[name]
        held[name] = Held(
            np.array(parameter), None if kept is None else np.array(kept), np.array(adam.mu[name]), np.array(adam.nu[name])
        )
    return held


class JaxRun:
    """A transform and its jitted update."""

    def __init__(self, case: Case) -> None:
        import jax.numpy as jnp

        problem = case.problem
        self.is_float64 = problem.dtype == "float64"
        tx, self.update = _transform_and_update(problem.rule, problem.hyperparameters, case.storage)
        with self._precision():
            # copies: a donated array must not be numpy's own memory
            self.parameters = {name: jnp.array(value) for name, value in problem.initial_parameters().items()}
            self.state = tx.init(self.parameters)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """See `Run`."""
        import jax.numpy as jnp

        with self._precision():
            given = {name: jnp.array(gradient) for name, gradient in gradients.items()}
            self.parameters, self.state = self.update(given, self.state, self.parameters)

    def held(self) -> dict[str, Held]:
        """See `Run`."""
        return held_of(self.parameters, self.state)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return float64() if self.is_float64 else contextlib.nullcontext()


def float64() -> contextlib.AbstractContextManager[Any]:
    """64-bit arrays inside. Older versions of JAX have it among the experimental functions."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    older: Any = experimental
    return older.enable_x64(True)


class JaxBackend:
    """See the module."""

    name = "jax"

    def unavailable(self) -> str | None:
        """See `Backend`."""
        try:
            from ... import jax_frontend  # noqa: F401
        except ImportError as error:
            return str(error)
        return None

    def refuses(self, case: Case) -> str | None:
        """See `Backend`."""
        from ... import jax_frontend

        rule = case.problem.rule.name
        return None if hasattr(jax_frontend, rule) else f"the JAX frontend has no {rule}"

    def start(self, case: Case) -> JaxRun:
        """See `Backend`."""
        return JaxRun(case)

    def refuses_trajectory(self, case: Trajectory) -> str | None:
        """See `parity.trajectories.RunsTrajectories`."""
        if case.mode == "release":
            return "an unrolled model has no release of its own: XLA frees its gradients in the plain step"
        if case.mode == "state":
            return "only make_release_step puts micro-batches into the moments"
        return case.program_skipped(self.name)

    def start_trajectory(self, case: Trajectory) -> TrajectoryRun:
        """See `parity.trajectories.RunsTrajectories`."""
        from ..trajectories.jax_runs import UnrolledTrajectory

        return UnrolledTrajectory(case)


def _adam_state(state: Any) -> Any:
    """The state of penstock's transform, alone or inside a chain's tuple."""
    if hasattr(state, "mu"):
        return state
    return next(found for part in state if isinstance(part, tuple) and (found := _adam_state(part)) is not None)
