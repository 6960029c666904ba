"""A jitted update that donates state and parameters, and deletes the gradients."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.core import Tracer

from .buffers import strong, typed_like
from .direct import apply_directly, as_transformation
from .donation import DonatingFunction
from .sharding import sharded_like
from .state import PyTree


class Update(DonatingFunction):
    """A jitted function (grads, state, params) -> (params, state), as `make_update` returns it.

    `lower` and `trace` are those of jax.jit. There the outputs are (state, params), each in the buffer of its argument:
    jax gives an output the first donated buffer of its shape and dtype, so the outputs have the order of the arguments.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        as_transformation(tx)  # raises

        def update(grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> tuple[PyTree, PyTree]:
            new_params, new_state = apply_directly(tx, *jax.tree.map(strong, (grads, state, params)), **extra_args)
            new = typed_like(state, new_state), typed_like(params, new_params)
            return sharded_like(new, (state, params))

        super().__init__(update, "state", "params", keep_unused=True)

    def __call__(self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> tuple[PyTree, PyTree]:
        """Return the new parameters and the new state. The arguments are deleted, but for extra_args, which go to tx.update."""
        state, params = super().__call__(grads, state, params, **extra_args)
        leaves = jax.tree_util.tree_leaves(params)
        if leaves and isinstance(leaves[0], Tracer):
            return params, state  # inside another jitted function, which decides what is donated
        # jax donates a buffer to an output, and no output is for the gradients' buffers. They are freed by deleting them:
        # the runtime keeps them until the update has read them.
        for leaf in jax.tree_util.tree_leaves(grads):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        return params, state


def make_update(tx: optax.GradientTransformation) -> Update:
    """Return a jitted update that donates state and parameters and deletes the gradients: there is never a second copy of them.

    It equals tx.update and optax.apply_updates, but new parameters of penstock's transforms are written directly: rounded
    once, and with compensation always exact. Under optax.apply_if_finite and optax.MultiSteps their increments are added,
    and a compensation is exact while p/2 <= p' <= 2p.

    Args:
        tx: any Optax transform.

    Returns:
        update(grads, state, params, **extra_args) -> (params, state), with the methods `lower` and `trace` of jax.jit.
        grads and params have the same structure and shapes; grads may have another floating-point dtype. state and params
        are donated, so no array of them may be given twice; grads are deleted. tx.init never aliases params in penstock's
        own transforms; `init_train_state` copies what others return, such as the key of optax.noisy_sgd. State and parameters
        keep their types, weak ones too, and their shardings, so that all updates share one compilation.

    Raises:
        InvalidArgumentError: tx is not a transform; at an update, an array that was deleted, or that is to be donated twice.
        UnsupportedTensorError: at an update, a leaf that is not an array.
        RefusedError: when traced, if a transform after a compensated one, or a wrapper around it, changes its updates.

    Example:
        update = make_update(tx)
        params, state = update(grads, state, params)
    """
    return Update(tx)
