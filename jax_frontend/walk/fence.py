"""The fence between reading the old slice of a stack and writing the new one.

Without a fence XLA fuses the read into the write of the loop's last instruction, and then copies whole stacks. On a CPU an
optimization barrier is removed before fusion and has no effect, but a conditional is kept. On a GPU a conditional would
synchronise with the host; there the barrier is kept until after scheduling.

A CPU computes in float32, too. What a loop only reads, a stack of low precision of which it needs a slice, is converted before
the loop, and what a gradient of low precision is added to in float32 is made at the program's beginning: conditionals keep
both where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core.dtypes import LOW_PRECISION
from ...core.errors import InvalidArgumentError
from ..array_ops import zeros_of
from ..state import PyTree
from .stacked import at, cast_like

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


def true_after(x: jax.Array) -> jax.Array:
    """Return a 0-d boolean that is true, which XLA cannot know, and which depends on an array."""
    first = x[(0,) * x.ndim]
    return (lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}")) | 1) != 0


def _in_low_precision(tree: PyTree) -> bool:
    return any(leaf.dtype.name in LOW_PRECISION for leaf in jax.tree.leaves(tree))


def added_after(
    fence: str, x: jax.Array, function: Callable[..., tuple[PyTree, PyTree]], total: PyTree, *others: PyTree
) -> tuple[PyTree, PyTree]:
    """Return function(total, *others), with nothing of it prepared before x exists where the total is of low precision.

    Args:
        fence: resolved.
        x: any array.
        function: returns the new total and something else.
        total: is replaced.
        others: what else the function reads.
    """
    if fence != "conditional" or not _in_low_precision(total):
        return function(total, *others)
    _, kinds = jax.eval_shape(function, total, *others)
    return lax.cond(true_after(x), function, lambda total, *_: (total, zeros_of(kinds)), total, *others)


def read_at(fence: str, stack: PyTree, index: jax.Array, count: int) -> PyTree:
    """Return the slice of every leaf at an index of the leading axis, in a loop over that axis which does not write the stack.

    Args:
        fence: resolved.
        stack: leaves with a leading axis.
        index: of the loop.
        count: length of that axis.
    """
    if fence != "conditional" or not _in_low_precision(stack):
        return at(stack, index)
    zeros = jax.eval_shape(lambda: at(stack, index))
    return lax.cond(index < count, lambda: at(stack, index), lambda: zeros_of(zeros))
