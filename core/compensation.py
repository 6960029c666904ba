r"""Compensation: low-precision parameters keep the bits that rounding would lose.

A compensated parameter is a pair (p, k) that represents one number of the compute dtype. `load` reads the number and `store`
writes it; the update does not know of the pair.

========== ============================= ======================================================================
none       p = cast(x)                   the bits that rounding removes are lost
kahan      p = cast(x), k = cast(x - p)  k in p's dtype; p + k has about twice p's digits
split      (p, k) = the bits of x        bfloat16 p and int16 k together are exactly the float32 number
split8     (p, k) = 24 bits of x         as split with an int8 k: x is rounded up or down to 24 bits by chance
stochastic p = x, rounded up or down     by chance, so that the mean is x; nothing is kept beside p
========== ============================= ======================================================================

`stochastic` and `split8` round by `core.stochastic_rounding`, with the bits of `core.random_bits`. `split` and `split8` round
ties away from zero, so that the remainder fits; everything else rounds to nearest, ties to even. float32 and float64 parameters
are never compensated.

A user may write a parameter (clamp, prune, project), and k is then the remainder of another number. `load` ignores k where p is
zero or infinite, and a kahan k above half a spacing of p: it reads a number within half a spacing of what was written. (So
split reads float32 numbers that round to zero or infinity in bfloat16, below 4.6e-41 and above 3.39e38, as these.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .array_ops import Array, ArrayOps
from .dtypes import LOW_PRECISION, compute_dtype
from .errors import InvalidArgumentError
from .stochastic_rounding import stochastically_rounded, without_low_bits

COMPENSATIONS = ("auto", "auto8", "none", "kahan", "split", "split8", "stochastic")
WITH_RANDOM_BITS = ("split8", "stochastic")

_HALF = 0x8000  # half of a bfloat16 spacing, in units of the float32 bit pattern
_HIGH_BITS = -0x10000  # 0xFFFF0000 as an int32
_SPLIT8_BITS = 8  # of a float32's, that split8 drops
_BELOW_HALF = 1.0 - 2.0**-12  # times half a spacing of p: rounds to p; times the next number above half: does not


class Stored(NamedTuple):
    """A parameter as it is stored, and the bits that its dtype cannot hold (None without compensation)."""

    parameter: Array
    compensation: Array | None


def resolve(compensation: str, parameter_dtype: str) -> str:
    """Return the compensation of a parameter with this dtype: one of `COMPENSATIONS` but "auto" and "auto8".

    Raises:
        InvalidArgumentError: an unknown name, or "split" or "split8" for a float16 parameter.
    """
    if compensation not in COMPENSATIONS:
        raise InvalidArgumentError(f"compensation={compensation!r} is not known; it must be one of {', '.join(COMPENSATIONS)}.")
    if parameter_dtype not in LOW_PRECISION:
        return "none"
    if compensation in ("auto", "auto8"):
        return compensation.replace("auto", "split") if parameter_dtype == "bfloat16" else "kahan"
    if compensation in ("split", "split8") and parameter_dtype == "float16":
        raise InvalidArgumentError(
            f"compensation={compensation!r} is not possible for a float16 parameter (float16 is not the upper half of "
            "float32); use compensation='kahan', 'stochastic', 'auto' or 'auto8'."
        )
    return compensation


def possible(parameter_dtype: str) -> tuple[str, ...]:
    """Return the resolved compensations that a parameter of this dtype can have without random bits, "none" first."""
    return {"bfloat16": ("none", "kahan", "split"), "float16": ("none", "kahan")}.get(parameter_dtype, ("none",))


def compensation_dtype(compensation: str, parameter_dtype: str) -> str | None:
    """Return the dtype of k for a resolved compensation, or None."""
    return {"none": None, "stochastic": None, "kahan": parameter_dtype, "split": "int16", "split8": "int8"}[compensation]


def load(ops: ArrayOps, compensation: str, stored: Stored) -> Array:
    """Return the number that (p, k) represents, in the compute dtype. A k that cannot be p's is ignored."""
    parameter, remainder = stored
    dtype, xp = ops.dtype_name(parameter), ops.xp
    upcast = ops.cast(parameter, compute_dtype(dtype))
    if compensation in ("none", "stochastic"):
        return upcast
    if compensation == "kahan":
        wanted = ops.cast(remainder, "float32")
        return xp.where(ops.round_to(upcast + wanted * _BELOW_HALF, dtype) == upcast, upcast + wanted, upcast)
    units = 1 if compensation == "split" else 1 << _SPLIT8_BITS
    number = ops.bitcast(ops.bitcast(upcast, "int32") + ops.cast(remainder, "int32") * units, "float32")
    magnitude = xp.abs(upcast)
    return xp.where((magnitude > 0) & (magnitude < math.inf), number, upcast)


def store(ops: ArrayOps, compensation: str, x: Array, parameter_dtype: str, bits: Array | None = None) -> Stored:
    """Return (p, k) for the number x in the compute dtype.

    Where p overflows to an infinity, kahan stores k = 0, so that p + k is that infinity. All NaNs are stored as one.

    Args:
        ops: the framework's casts.
        compensation: resolved.
        x: float32 where it is compensated.
        parameter_dtype: of p.
        bits: of x's shape, for `WITH_RANDOM_BITS`: words of `core.random_bits`.
    """
    if compensation == "stochastic":
        assert bits is not None
        x = stochastically_rounded(ops, x, parameter_dtype, bits)
        compensation = "none"
    if compensation == "none":
        return Stored(ops.cast(x, parameter_dtype), None)
    xp = ops.xp
    if compensation == "kahan":
        rounded = ops.round_to(x, parameter_dtype)
        finite = xp.isfinite(rounded)
        remainder = xp.where(finite, x, 0.0) - xp.where(finite, rounded, 0.0)
        return Stored(ops.cast(rounded, parameter_dtype), ops.cast(remainder, parameter_dtype))
    if compensation == "split8":
        assert bits is not None
        x = without_low_bits(ops, x, _SPLIT8_BITS, bits)
    pattern = ops.bitcast(xp.where(x == x, x, float("nan")), "int32")  # as isnan, which Inductor does not vectorise
    high = (pattern + _HALF) & _HIGH_BITS
    parameter = ops.cast(ops.bitcast(high, "float32"), "bfloat16")
    if compensation == "split8":
        return Stored(parameter, ops.cast((pattern - high) >> _SPLIT8_BITS, "int8"))
    return Stored(parameter, ops.cast(pattern - high, "int16"))
