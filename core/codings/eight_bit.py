r"""8 bits for each element, and a float32 scale for each block of 128 in a row of a matrix.

A scale s is the largest magnitude in its block (or 2^-94, if that is less):

    signed    |code| = round(z^(1/2)), z = |x| * 127^2/s               x = code*|code| * s/127^2
    squares   code = floor(z^(1/4)) or one more, z = x * 255^4/s       x = code^4 * s/255^4

Squares are rounded stochastically: to the neighbours a < b with P(b) = (z - a^4)/(b^4 - a^4), so that the mean is x.
Rounded to nearest, the code of a mean that changes by less than a step would stay, and follow the scale of its block instead
of its own gradient. A code is at least 1 where x > 0: m/sqrt(v) would be enormous with v = 0.

A row is what the parameter has behind its first dimension: trailing dimensions are merged, so that the small ones of a
convolution cost no scales of their own. The last block of a row may be shorter. An infinity or NaN makes its block NaN. With a
scale of at least 2^-94, no factor overflows and no code stands for a subnormal number.

Source: blocks with a scale each are Dettmers et al., https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..array_ops import Array, ArrayOps
from ..random_bits import highest
from ..rules import Field

BLOCK = 128
"""Elements that share a scale."""

SMALLEST = 4096
"""Fewest elements of a parameter whose fields are coded."""

SIGNED, SQUARES = 127.0, 255.0
"""The largest code of a signed number and of a square."""

LEAST_SCALE = 2.0**-94
"""The least scale that is stored, also for a block of zeros. Before the first update a scale is 0."""

_UNIT = 2.0**-24


class EightBit(NamedTuple):
    """A coded field.

    codes: of the parameter's shape; int8 for signed numbers, uint8 for squares.
    scale: float32, [rows, blocks of a row]. Of a vector, a part of a row that begins with a block: [blocks].
    """

    codes: Array
    scale: Array


def is_coded(shape: Sequence[int]) -> bool:
    """Whether the fields of a parameter of this shape are coded: a matrix with long rows, for which scales cost little.

    Of a stack of layers, it is the shape of one layer.
    """
    return len(shape) > 1 and math.prod(shape) >= SMALLEST and math.prod(shape[1:]) >= BLOCK


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a parameter."""
    return shape[0], -(-math.prod(shape[1:]) // BLOCK)


def initial(ops: ArrayOps, field: Field, parameter: Array) -> EightBit:
    """Return the codes of zeros for a parameter."""
    codes = ops.zeros_like(parameter, "uint8" if field.of_squares else "int8")
    return EightBit(codes, ops.zeros(scale_shape(parameter.shape), "float32", parameter))


def decoded(ops: ArrayOps, stored: EightBit) -> Array:
    """Return the numbers, float32, of the codes' shape."""
    codes, scale = stored
    number, signed = _blocks(ops, ops.cast(codes, "float32")), ops.dtype_name(codes) == "int8"
    scale = scale.reshape(*number.shape[:-1], 1)
    units = number * ops.xp.abs(number) if signed else _fourth_power(number)
    return _elements(units * (scale * (1 / (SIGNED**2 if signed else SQUARES**4))), codes.shape)


def encoded(ops: ArrayOps, x: Array, like: EightBit, bits: Array | None) -> EightBit:
    """Return numbers as codes.

    Args:
        ops: the framework's casts.
        x: float32, of the codes' shape; squares are not negative.
        like: the field as it was stored before.
        bits: of x's shape, for squares: words of `core.random_bits`, of which the highest 24 are used.
    """
    xp, dtype = ops.xp, ops.dtype_name(like.codes)
    blocks = _blocks(ops, x)
    largest = ops.largest(xp.abs(blocks))
    usable = largest < math.inf
    blocks, scale = xp.where(usable, blocks, 0.0), xp.clip(xp.where(usable, largest, 0.0), LEAST_SCALE, None)
    factor = xp.full_like(scale, SIGNED**2 if dtype == "int8" else SQUARES**4) / scale  # torch's number/scale is rounded twice
    if dtype == "int8":
        size = xp.round(xp.sqrt(xp.abs(blocks) * factor))
        code = xp.where(blocks < 0, -size, size)
    else:
        assert bits is not None
        code = xp.clip(_rounded_squares(ops, blocks * factor, _blocks(ops, bits)), 0.0, SQUARES)  # z may exceed 255^4
        code = xp.maximum(code, ops.cast(blocks > 0, "float32"))
    kept = xp.where(usable, scale, math.nan).reshape(like.scale.shape)
    return EightBit(_elements(ops.cast(code, dtype), x.shape), kept)


def _rounded_squares(ops: ArrayOps, z: Array, bits: Array) -> Array:
    """Return the codes of numbers z in [0, 255^4], rounded so that the mean of a code's fourth power is z.

    A code is a = floor(z^(1/4)), plus 1 where u*((a+1)^4 - a^4) < z - a^4 with u random in [0, 1). For the difference,
    (a+1)^4 - a^4 = (e + e^3)/2 with e = 2a + 1.
    """
    xp = ops.xp
    low = xp.floor(xp.sqrt(xp.sqrt(z)))
    odd = 2.0 * low + 1.0
    half = ops.cast(highest(24, bits), "float32") * (_UNIT / 2) * odd
    return low + ops.cast(half + half * (odd * odd) < z - _fourth_power(low), "float32")


def _fourth_power(x: Array) -> Array:
    square = x * x
    return square * square


def _blocks(ops: ArrayOps, x: Array) -> Array:
    """Return x as [..., BLOCK], with zeros behind the end of a row."""
    if tuple(x.shape[1:]) == (BLOCK,):
        return x  # a block is a row, and a compiler joins loops over the same dimensions
    rows = x if x.ndim == 1 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    if missing := -rows.shape[-1] % BLOCK:
        rows = ops.padded(rows, missing)
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK, BLOCK)


def _elements(blocks: Array, shape: Sequence[int]) -> Array:
    """Return what `_blocks` has cut, in its shape."""
    if tuple(blocks.shape) == tuple(shape):
        return blocks
    columns = shape[0] if len(shape) == 1 else math.prod(shape[1:])
    rows = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    return rows[..., :columns].reshape(shape)
