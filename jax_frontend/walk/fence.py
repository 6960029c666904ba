"""The fence between reading the old slice of a stack and writing the new one.

Without a fence XLA fuses the read into the write of the loop's last instruction, and then copies whole stacks. On a CPU an
optimization barrier is removed before fusion and has no effect, but a conditional is kept. On a GPU a conditional would
synchronise with the host; there the barrier is kept until after scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core.errors import InvalidArgumentError
from ..state import PyTree
from .stacked import cast_like

FENCES = ("auto", "conditional", "barrier", "none")


def resolve_fence(fence: Any) -> str:
    """Return the fence to use; "auto" is the conditional on a CPU and the barrier on other devices."""
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
    """Return function(old, *others), which has the structure and dtypes of old, computed behind a fence.

    Args:
        fence: resolved.
        function: the update.
        old: what it replaces.
        others: what else it reads.
        always: a 0-d boolean that is true, which XLA cannot know; the conditional needs one.
        proceed: a 0-d boolean: False returns old, bit for bit. None: always update.
    """

    def update(old: PyTree, *others: PyTree) -> PyTree:
        return cast_like(function(old, *others), old)

    if fence == "conditional":
        condition = proceed if always is None else always if proceed is None else always & proceed
        if condition is None:
            return update(old, *others)
        return lax.cond(condition, update, lambda old, *others: old, old, *others)
    if fence == "barrier":
        old, others = lax.optimization_barrier((old, others))
    new = update(old, *others)
    if proceed is not None:
        new = jax.tree.map(lambda n, o: jnp.where(proceed, n, o), new, old)
    return lax.optimization_barrier(new) if fence == "barrier" else new
