"""One jitted update that uses up what it is given: gradients, state and parameters."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.core import Tracer

from .buffers import strong, typed_like
from .direct import apply_directly, as_transformation
from .donation import DonatingFunction
from .state import PyTree


class Update(DonatingFunction):
    """A jitted (grads, state, params) -> (params, state); see `make_update`.

    `lower` and `trace` are those of jax.jit. There the outputs are (state, params), each in the buffer it came in: jax
    gives an output the first donated buffer of its shape and dtype, so the outputs come in the order of the arguments.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        as_transformation(tx)  # raises

        def update(grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> tuple[PyTree, PyTree]:
            new_params, new_state = apply_directly(tx, *jax.tree.map(strong, (grads, state, params)), **extra_args)
            return typed_like(state, new_state), typed_like(params, new_params)

        super().__init__(update, "state", "params", keep_unused=True)

    def __call__(self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> tuple[PyTree, PyTree]:
        """The new parameters and the new state. The arrays given are deleted; extra_args go to tx.update, and stay."""
        state, params = super().__call__(grads, state, params, **extra_args)
        leaves = jax.tree_util.tree_leaves(params)
        if leaves and isinstance(leaves[0], Tracer):
            return params, state  # inside another jitted function, which decides what is donated
        # jax donates a buffer only to an output, and nothing that comes out is for the gradients' buffers. Deleted they
        # are free, too, as soon as the update has read them.
        for leaf in jax.tree_util.tree_leaves(grads):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        return params, state


def make_update(tx: optax.GradientTransformation) -> Update:
    """A jitted update that uses up gradients, state and parameters: no second copy of any of them ever exists.

    Equal to tx.update and optax.apply_updates, but parameters of penstock's transforms are written directly: rounded
    once, and with compensation always exact. Under optax.apply_if_finite and optax.MultiSteps their increments are added,
    and a compensation is exact while p/2 <= p' <= 2p.

    Args:
        tx: any Optax transform.

    Returns:
        update(grads, state, params, **extra_args) -> (params, state), with the methods `lower` and `trace` of jax.jit.
        grads and params have the same structure and shapes; grads may have another floating-point dtype. state and params
        are donated, so no array of them may be given twice; grads are deleted. tx.init never aliases params in penstock's
        own transforms. State and parameters keep their types, weak ones too, so that all updates share one compilation.

    Raises:
        InvalidArgumentError: tx is not a transform; at an update, an array that was deleted, or that is to be donated twice.
        UnsupportedTensorError: at an update, a leaf that is not an array.
        RefusedError: when traced, if a transform after a compensated one, or a wrapper around it, changes its updates.
    """
    return Update(tx)
