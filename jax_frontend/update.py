"""One jitted update that uses up what it is given: gradients, state and parameters are all donated."""

from __future__ import annotations

from typing import Any

import jax
import optax

from .buffers import check_donated, strong
from .direct import apply_directly, as_transformation
from .state import PyTree


class Update:
    """A jitted (grads, state, params) -> (params, state); see `make_update`. `lower` is that of jax.jit."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        as_transformation(tx)  # raises

        def update(grads: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]) -> tuple[PyTree, PyTree, PyTree]:
            params, state = apply_directly(tx, grads, state, params, **extra_args)
            # A donated buffer is only given up for an output of its shape and dtype, and nothing else that comes out is
            # for the gradients'. So they come out themselves, unread and unwritten, and are dropped below. In the order
            # of the arguments every output finds its own buffer first.
            return grads, state, params

        self._jitted = jax.jit(update, donate_argnums=(0, 1, 2))

    def __call__(self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> tuple[PyTree, PyTree]:
        """The new parameters and the new state. The arrays given are deleted; extra_args go to tx.update, and stay."""
        check_donated({"grads": grads, "state": state, "params": params}, extra_args)
        grads, state, params = jax.tree.map(strong, (grads, state, params))
        _, state, params = self._jitted(grads, state, params, extra_args)
        return params, state

    def lower(self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any) -> jax.stages.Lowered:
        """The lowered computation, whose outputs are (grads, state, params), each in the buffer it came in."""
        return self._jitted.lower(grads, state, params, extra_args)


def make_update(tx: optax.GradientTransformation) -> Update:
    """A jitted update that donates gradients, state and parameters: no second copy of any of them ever exists.

    Equal to tx.update and optax.apply_updates, but parameters of penstock's transforms are written directly: rounded
    once, and with compensation always exact. Under optax.apply_if_finite and optax.MultiSteps their increments are added,
    and a compensation is exact while p/2 <= p' <= 2p.

    Args:
        tx: any Optax transform.

    Returns:
        update(grads, state, params, **extra_args) -> (params, state), with a method `lower`. grads and params have the
        same structure and shapes; grads may have another floating-point dtype. The arrays given to it are deleted, so
        no two of them may share a buffer. tx.init never aliases params in penstock's own transforms.

    Raises:
        InvalidArgument: tx is no transform; before an update, if two of its arrays share a buffer, or one was donated already.
        Refused: when traced, if a transform after a compensated one, or a wrapper around it, changes its updates.
    """
    return Update(tx)
