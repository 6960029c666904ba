"""What a training step takes and gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .buffers import buffers, strong
from .direct import as_transformation
from .state import PyTree


class TrainState(NamedTuple):
    """What a training step takes and gives back."""

    params: PyTree  # the parameters
    opt_state: PyTree  # of the Optax transform


def init_train_state(tx: optax.GradientTransformation, params: PyTree) -> TrainState:
    """The state before the first step. Every array in it is its own: params stay usable when the state is donated.

    Args:
        tx: any Optax transform.
        params: copied.
    """
    copied = jax.tree.map(lambda leaf: strong(jnp.copy(leaf)), params)
    taken: set[Any] = set()

    def own(leaf: Any) -> Any:
        # Some transforms start from the parameters themselves (averages of them); a buffer can be donated only once.
        held = buffers(leaf)
        shared = not taken.isdisjoint(held)
        taken.update(held)
        return jnp.copy(leaf) if shared else leaf

    return jax.tree.map(own, TrainState(copied, as_transformation(tx).init(copied)))
