"""The backend "jax": `penstock.jax_frontend` transforms under `make_update`, jitted and donated."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..cases import Case
from .protocol import Held


class JaxRun:
    """A transform and its jitted update."""

    def __init__(self, case: Case) -> None:
        import jax.numpy as jnp

        from ... import jax_frontend

        problem, storage = case.problem, case.storage
        given = problem.hyperparameters
        self.is_float64 = problem.dtype == "float64"
        transform: Any = getattr(jax_frontend, problem.rule.name)
        tx = transform(
            given.learning_rate,
            b1=given.beta1,
            b2=given.beta2,
            eps=given.eps,
            weight_decay=given.weight_decay,
            mu_dtype=storage.state_dtype,
            nu_dtype=storage.state_dtype,
            compensation=storage.compensation,
        )
        self.update = jax_frontend.make_update(tx)
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
        state = _adam_state(self.state)
        held = {}
        for name, parameter in self.parameters.items():
            kept = None if state.compensation is None else state.compensation[name]
            held[name] = Held(
                np.array(parameter),
                None if kept is None else np.array(kept),
                np.array(state.mu[name]),
                np.array(state.nu[name]),
            )
        return held

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


def _adam_state(state: Any) -> Any:
    """The state of penstock's transform, alone or inside a chain's tuple."""
    if hasattr(state, "mu"):
        return state
    return next(found for part in state if isinstance(part, tuple) and (found := _adam_state(part)) is not None)
