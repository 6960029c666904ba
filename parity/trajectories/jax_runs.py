"""The model in JAX: unrolled for `make_train_step`, its layers stacked for the reverse walk of `make_release_step`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import jax_frontend
from ...demonstration.jax_model import layer_stack, make_loss, stacked
from ..backends.jax_arguments import Recipe, float64, held_of
from ..backends.protocol import Held
from ..cases import Storage
from .cases import SHAPE, Trajectory, start


class UnrolledTrajectory:
    """The model with unrolled layers, under `make_train_step`."""

    norm_eps = 0.0

    def __init__(self, case: Trajectory) -> None:
        self.case = case
        tx = Recipe(case.rule, ((),), (case.hyperparameters,), None, None, Storage("none", None)).transform()
        with self._precision():
            parameters = {name: jnp.array(value) for name, value in start(case.dtype).items()}
            self.state, self._step = self._made(tx, parameters)

    def _made(self, tx: Any, parameters: dict[str, Any]) -> tuple[Any, Any]:
        """The state of training, and the step, jitted and donated."""
        step = jax_frontend.make_train_step(
            make_loss(SHAPE), tx, microbatches=self.case.microbatches, max_norm=self.case.max_norm
        )
        return jax_frontend.init_train_state(tx, parameters), step

    def step(self, batch: np.ndarray) -> None:
        with self._precision():
            self.state, _ = self._step(self.state, batch)

    def held(self) -> dict[str, Held]:
        return held_of(self.state.params, self.state.opt_state)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """64-bit arrays where they are asked for; and products in full, which accelerators would otherwise round."""
        with contextlib.ExitStack() as stack:
            if self.case.dtype == "float64":
                stack.enter_context(float64())
            stack.enter_context(jax.default_matmul_precision("highest"))
            yield


class StackedTrajectory(UnrolledTrajectory):
    """The model with stacked layers, under `make_release_step`."""

    def _made(self, tx: Any, parameters: dict[str, Any]) -> tuple[Any, Any]:
        stack = layer_stack(SHAPE)
        step = jax_frontend.make_release_step(
            stack,
            tx,
            microbatches=self.case.microbatches,
            max_norm=self.case.max_norm,
            accumulation="state" if self.case.mode == "state" else None,
        )
        return jax_frontend.init_train_state(tx, stacked(parameters, SHAPE), stack=stack), step

    def held(self) -> dict[str, Held]:
        params, state = self.state.params, self.state.opt_state
        held = held_of(params["outer"], state.outer)
        layers = jax.tree.map(np.array, (params["layers"], state.layers))
        for number in range(SHAPE.layers):
            layer, of_layer = jax.tree.map(lambda leaf, i=number: leaf[i], layers)
            held |= {f"layers.{number}.{name}": tensor for name, tensor in held_of(layer, of_layer).items()}
        return held
