r"""Stochastic rounding: to one of the two neighbours, up with a probability that makes the mean the number itself.

    P(up) = (x - down) / (up - down)        so that        E[rounded] = x

A number that the dtype can hold never moves, zeros keep their sign, and NaN and the infinities stay. A number above the largest
finite one has no two finite neighbours, and is rounded to nearest.

Half a spacing is added to a float32's bits to round it to nearest, and here a random number below a spacing; what the dtype
cannot hold is then cut off. Below 2^-14, where the spacing of float16 is constant, the number is first written with a fixed
point at 2^-44: its mean is right within 2^-20 of a spacing. Everywhere else it is exact.
"""

from __future__ import annotations

from .array_ops import Array, ArrayOps
from .random_bits import highest

DROPPED_BITS = {"bfloat16": 16, "float16": 13}
"""Bits of a float32 that a normal number of the dtype has not."""

LARGEST = {"bfloat16": 2.0**128 - 2.0**120, "float16": 65504.0}
"""The largest finite numbers."""

_SMALLEST_NORMAL_FLOAT16, _SPACING_BITS, _POINT = 2.0**-14, 20, 2.0**44  # a spacing of 2^-24 is 2^20 units of 2^-44


def stochastically_rounded(ops: ArrayOps, x: Array, dtype: str, bits: Array) -> Array:
    """Return x rounded to values of `dtype`, as float32; above its largest finite number x itself.

    Args:
        ops: the framework's casts.
        x: float32, any shape.
        dtype: "bfloat16" or "float16".
        bits: of x's shape: words of `core.random_bits`, of which the highest 20 are used.
    """
    xp = ops.xp
    inside = xp.abs(x) < LARGEST[dtype]
    finite = xp.where(inside, x, 0.0)
    rounded = ops.bitcast(_cut(ops, ops.bitcast(finite, "int32"), bits, DROPPED_BITS[dtype]), "float32")
    if dtype == "float16":
        small = xp.abs(finite) < _SMALLEST_NORMAL_FLOAT16
        units = ops.cast(xp.where(small, xp.abs(finite), 0.0) * _POINT, "int32")
        fixed = ops.cast(_cut(ops, units, bits, _SPACING_BITS), "float32") / _POINT
        rounded = xp.where(small, xp.copysign(fixed, finite), rounded)
    return xp.where(inside, rounded, x)


def without_low_bits(ops: ArrayOps, x: Array, count: int, bits: Array) -> Array:
    """Return float32 numbers rounded to those whose low bits are zero; at the end of bfloat16's range x itself.

    Args:
        count: of low bits.
        bits: of x's shape: words of `core.random_bits`.
    """
    inside = ops.xp.abs(x) < LARGEST["bfloat16"]
    pattern = ops.bitcast(ops.xp.where(inside, x, 0.0), "int32")
    return ops.xp.where(inside, ops.bitcast(_cut(ops, pattern, bits, count), "float32"), x)


def _cut(ops: ArrayOps, number: Array, bits: Array, count: int) -> Array:
    """Return an int32 with its low bits zero, rounded up in magnitude with a probability of them / 2^count."""
    return (number + ops.cast(highest(count, bits), "int32")) & -(1 << count)
