"""Updates of large tensors on a CPU without a float32 copy of them: one result after the other, or some rows after the other.

A CPU program of XLA has one loop for each result of an elementwise computation. What several results need (the new moment, the
new number before it is rounded) is stored in float32 for the whole tensor: up to 6 bytes for each byte of a bfloat16
parameter, and 13 to 19 for each element with fields in 8 bits.

**Low precision, one by one.** Every result is computed by itself, in a conditional, so that XLA shares nothing between them;
each condition depends on the result before, so that they are written in this order. (A loop over pieces would be slow: a CPU
program writes a slice of a bfloat16 array by writing all of it. A GPU program has one loop for all results.)

**Coded fields, by rows.** What a block's scale and its codes share would be computed twice, so here is a loop over rows. A
conditional in it separates the reading of old rows from the writing of new ones, without which XLA copies the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core.array_ops import Array
from ..core.codings import Coded, EightBit
from ..core.dtypes import LOW_PRECISION
from .array_ops import jax_ops

LARGE = 2**20
"""Tensors in low precision with more elements are updated in this way."""

PIECE = 2**18
"""Number of elements that are summed at a time, or updated, where fields are coded."""


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
    return jax_ops.dtype_name(parameter) in LOW_PRECISION and jnp.size(parameter) > LARGE and _on_the_only_cpu()


def is_updated_by_rows(parameter: Array, fields: Sequence[Coded]) -> bool:
    """Return whether a parameter is to be updated some rows after the other: with coded fields, on the only device, a CPU."""
    coded = any(isinstance(field, EightBit) for field in fields)
    return coded and jnp.size(parameter) > PIECE and _on_the_only_cpu()


def _on_the_only_cpu() -> bool:
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


def by_rows(
    function: Callable[..., Sequence[Coded | None]], read: Sequence[Array | None], old: Sequence[Coded | None], turn: Turn
) -> Sequence[Any]:
    """Return function(0, *read, *old), some rows after the other; each result is written over what it replaces.

    Temporaries are the float32 copies of the rows, and one array like each of `old` in low precision: its bits as integers, of
    which XLA writes a slice without writing all of it.

    Args:
        function: takes the number of the first of some rows (uint32), and these; returns what replaces each of `old`, in its
            dtype, or None.
        read: arrays of one shape, the first of them not None.
        old: arrays of as many rows, coded fields, or None.
        turn: of this update; afterwards of what is to wait for it.
    """
    first: Any = read[0]
    length, rows = first.shape[0], _length_of_piece(first, 0)
    count, rest = divmod(length, rows)

    def replaced(arrays: Any, start: Any, size: int, always: Array) -> Any:
        def new(part: Any) -> Any:
            given = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tuple(read))
            results = function(jax_ops.cast(start, "uint32"), *given, *jax.tree.map(_numbers, part, old))
            return jax.tree.map(_integers, tuple(results))

        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), arrays)
        changed = lax.cond(always, new, lambda part: part, part)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), arrays, changed)

    def body(i: Array, arrays: Any) -> Any:
        return replaced(arrays, i * rows, rows, turn.always & (i < count))

    arrays = lax.fori_loop(0, count, body, jax.tree.map(lambda x: _integers_after(turn.always, x), tuple(old)))
    if rest:
        arrays = replaced(arrays, jnp.asarray(count * rows), rest, turn.always)
    turn.pass_on(jax.tree.leaves(arrays)[-1])
    found: Sequence[Any] = jax.tree.map(_numbers, arrays, tuple(old))
    return found


def _integers(x: Array) -> Array:
    """Return the bits of an array in low precision; others as they are."""
    return _bits(x) if jax_ops.dtype_name(x) in LOW_PRECISION else x


def _integers_after(always: Array, x: Array) -> Array:
    """Return `_integers` of an array that is not copied before `always` is known."""
    if jax_ops.dtype_name(x) not in LOW_PRECISION:
        return x
    return lax.cond(always, _bits, lambda x: jnp.zeros_like(_bits(x)), x)


def _numbers(x: Array, like: Array) -> Array:
    """Return what `_integers` has made of an array like that."""
    return jax_ops.bitcast(x, jax_ops.dtype_name(like)) if x.dtype != like.dtype else x


def _length_of_piece(x: Array, axis: int) -> int:
    return int(max(1, PIECE * x.shape[axis] // x.size))


def mean_of_pieces(function: Callable[..., Array], arrays: Sequence[Coded | None], axis: int | None = None) -> Array:
    """Return function(*arrays) of a function that returns a mean over all elements, from its means over pieces.

    XLA sums with a library on a CPU, for which it stores scalars as arrays of the tensor's shape.

    Args:
        function: returns a 0-d array.
        arrays: of one shape, the first of them an array; coded fields where axis is 0.
        axis: along which they are cut; None: the longest.
    """
    first: Any = arrays[0]
    axis = max(range(first.ndim), key=first.shape.__getitem__) if axis is None else axis
    length = first.shape[axis]
    rows = _length_of_piece(first, axis)

    def of(start: Any, size: int) -> Array:
        pieces = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), tuple(arrays))
        return function(*pieces) * (size / length)

    count, rest = divmod(length, rows)
    zero = jnp.zeros_like(jax.eval_shape(lambda: of(0, rows)))

    def add(i: Array, total: Array) -> Array:
        # In a conditional: XLA would convert all of a tensor to float32 before the loop, instead of a piece inside.
        return total + lax.cond(i < count, lambda: of(i * rows, rows), lambda: zero)

    total = lax.fori_loop(0, count, add, zero)
    return total + of(count * rows, rest) if rest else total
