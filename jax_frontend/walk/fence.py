"""The fence between reading the old slice of a stack and writing the new one.

Without it XLA fuses the read into the write of the loop's last instruction, and then copies whole stacks to be safe. On a
CPU an optimization barrier is expanded before fusion and does nothing; a conditional stays. On a GPU a conditional
would wait for the host; there the barrier survives until after scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core.errors import InvalidArgumentError
from ..state import PyTree
from .stacked import like

FENCES = ("auto", "conditional", "barrier", "none")


def resolve_fence(fence: Any) -> str:
    """The fence to use: "auto" is the conditional on a CPU, the barrier elsewhere."""
    if fence not in FENCES:
        raise InvalidArgumentError(f"fence={fence!r} is not known; it must be one of {', '.join(FENCES)}.")
    if fence == "auto":
        return "conditional" if jax.default_backend() == "cpu" else "barrier"
    return str(fence)


def fenced(
    fence: str,
    function: Callable[..., PyTree],
    old: PyTree,
    *others: PyTree,
    always: jax.Array | None = None,
    proceed: jax.Array | None = None,
) -> PyTree:
    """function(old, *others), which has the structure and dtypes of old, behind a fence.

    Args:
        fence: resolved.
        function: the update.
        old: what it replaces.
        others: what else it reads.
        always: a 0-d boolean that is true, but not for XLA to see; for the conditional.
        proceed: a 0-d boolean: False leaves old as it is, on every bit. None: there is no question.
    """

    def update(old: PyTree, *others: PyTree) -> PyTree:
        return like(function(old, *others), old)

    if fence == "conditional":
        decided = proceed if always is None else always if proceed is None else always & proceed
        if decided is None:
            return update(old, *others)
        return lax.cond(decided, update, lambda old, *others: old, old, *others)
    if fence == "barrier":
        old, others = lax.optimization_barrier((old, others))
    new = update(old, *others)
    if proceed is not None:
        new = jax.tree.map(lambda n, o: jnp.where(proceed, n, o), new, old)
    return lax.optimization_barrier(new) if fence == "barrier" else new
