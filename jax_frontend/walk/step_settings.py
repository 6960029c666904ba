"""What the steps of the reverse walk share: their settings, their state by stack, and the gradient that a transform gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..array_ops import upcast
from ..loss_scaling import LossScale
from ..norms import clipped
from ..state import PyTree
from ..train_state import LayeredState, TrainState
from .layer_stack import LayerStack, by_name, without_names


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The arguments of `make_release_step`, checked; fence is resolved."""

    model: LayerStack
    tx: optax.GradientTransformation
    microbatches: int
    max_norm: float | None
    save_residuals: bool
    fence: str
    has_aux: bool

    def ready(self, grads: PyTree, params: PyTree, scale: jax.Array | None = None, norm: jax.Array | None = None) -> PyTree:
        """Return gradients as the transform gets them: unscaled, clipped, in the parameters' dtypes.

        Unscaled float16 gradients stay float32, since they would be too small again.

        Args:
            grads, params: of a layer, or the outer ones.
            scale: the loss scale; None: there is none.
            norm: the global norm; None: do not clip.
        """
        if scale is not None:
            grads = jax.tree.map(lambda g: upcast(g) / scale.astype(upcast(g).dtype), grads)
        if norm is not None:
            grads = clipped(grads, norm, self.max_norm)

        def rounded(g: jax.Array, p: jax.Array) -> jax.Array:
            return g if scale is not None and p.dtype == jnp.float16 else g.astype(p.dtype)

        return jax.tree.map(rounded, grads, params)


def split_state(model: LayerStack, state: TrainState) -> tuple[PyTree, dict[str, PyTree], dict[str, PyTree]]:
    """Return the outer parameters and, by name of the stack, the layers and their optimizer states."""
    return state.params["outer"], by_name(model, state.params["layers"]), by_name(model, state.opt_state.layers)


def joined_state(
    model: LayerStack, outer: tuple[PyTree, PyTree], layers: dict[str, tuple[PyTree, PyTree]], loss_scale: LossScale | None
) -> TrainState:
    """Return the train state of (parameters, optimizer state) of the outer parameters and of each stack."""
    columns: list[Any] = [without_names(model, {name: pair[i] for name, pair in layers.items()}) for i in (0, 1)]
    return TrainState({"outer": outer[0], "layers": columns[0]}, LayeredState(outer[1], columns[1]), loss_scale)
