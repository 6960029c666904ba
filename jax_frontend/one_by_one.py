"""Updates of large tensors in low precision on a CPU: one result after the other, so that no float32 copy of a tensor exists.

A CPU program of XLA has one loop for each result of an elementwise computation. What several results need (the new moment, the
new number before it is rounded) is stored in float32 for the whole tensor: up to 6 bytes for each byte of a bfloat16
parameter. Here every result is computed by itself, in a conditional, so that XLA shares nothing between them; each condition
depends on the result before, so that they are written in this order. (A loop over pieces would be slow: a CPU program writes
a slice of a bfloat16 array by writing all of it. A GPU program has one loop for all results.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core.array_ops import Array
from ..core.dtypes import LOW_PRECISION
from .array_ops import jax_ops

LARGE = 2**20
"""Tensors with more elements are updated in this way."""

PIECE = 2**18
"""Number of elements that are summed at a time."""


@dataclasses.dataclass
class Turn:
    """The place of an update in the order of a program."""

    always: Array
    """0-d boolean that is true, which XLA cannot know, and which depends on everything that has to be written before."""

    def pass_on(self, written: Array) -> None:
        """Let what comes next wait for an array."""
        self.always = (_bits(written[(0,) * written.ndim]) | 1) != 0


def is_updated_one_by_one(parameter: Array) -> bool:
    """Return whether a parameter is to be updated in this way: large, in low precision, and on the only device, a CPU."""
    if jax_ops.dtype_name(parameter) not in LOW_PRECISION or jnp.size(parameter) <= LARGE:
        return False
    return jax.device_count() == 1 and jax.default_backend() == "cpu"


def one_by_one(
    function: Callable[..., Sequence[Array | None]], gradient: Array, old: Sequence[Array | None], turn: Turn
) -> list[Any]:
    """Return function(gradient, *old), one result after the other.

    XLA writes each result over what it replaces, unless a later result reads that. The first one is put aside until all others
    are written, since it and the second read each other's old value. So temporaries are one array like old[0], if there is one.

    Args:
        function: elementwise; returns what replaces each of `old`, in its dtype, or None.
        gradient: of any shape.
        old: arrays of that shape, or None.
        turn: of this update; afterwards of what is to wait for it.
    """

    def written(new: Callable[..., Array], kept: Callable[..., Array], *arrays: Any) -> Array:
        result = lax.cond(turn.always, new, kept, *arrays)
        turn.pass_on(result)
        return result

    def result(index: int) -> Array:
        stored = _bits if index == 0 else lambda x: x  # as integers: XLA would not see a difference to writing it at once
        return written(lambda *arrays: stored(function(*arrays)[index]), lambda _, *old: stored(old[index]), gradient, *old)

    results: list[Any] = [None if before is None else result(index) for index, before in enumerate(old)]
    if old[0] is not None:
        dtype = jax_ops.dtype_name(old[0])
        results[0] = written(lambda bits, _: jax_ops.bitcast(bits, dtype), lambda _, old: old, results[0], old[0])
    return results


def _bits(x: Array) -> Array:
    return jax_ops.bitcast(x, f"uint{8 * x.dtype.itemsize}")


def mean_of_pieces(function: Callable[..., Array], arrays: Sequence[Array | None]) -> Array:
    """Return function(*arrays) of a function that returns a mean over all elements, from its means over pieces.

    XLA sums with a library on a CPU, for which it stores scalars as arrays of the tensor's shape.

    Args:
        function: returns a 0-d array.
        arrays: of one shape, the first of them not None.
    """
    first: Any = arrays[0]
    axis = max(range(first.ndim), key=first.shape.__getitem__)
    length = first.shape[axis]
    rows = max(1, PIECE * length // first.size)

    def of(start: Any, size: int) -> Array:
        pieces = (None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis) for x in arrays)
        return function(*pieces) * (size / length)

    count, rest = divmod(length, rows)
    zero = jnp.zeros_like(jax.eval_shape(lambda: of(0, rows)))

    def add(i: Array, total: Array) -> Array:
        # In a conditional: XLA would convert all of a tensor to float32 before the loop, instead of a piece inside.
        return total + lax.cond(i < count, lambda: of(i * rows, rows), lambda: zero)

    total = lax.fori_loop(0, count, add, zero)
    return total + of(count * rows, rest) if rest else total
