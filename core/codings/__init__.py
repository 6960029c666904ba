"""How a rule's fields lie in memory: cast to a dtype, rounded stochastically to bfloat16, or in 8 bits.

`load` reads a field in the compute dtype, and `store` writes it as it was stored before. The rule's arithmetic is between them
and does not know of codings.
"""

from __future__ import annotations

from typing import Any

from ..array_ops import Array, ArrayOps
from ..rules import Field
from ..stochastic_rounding import stochastically_rounded
from .eight_bit import EightBit, decoded, encoded, initial
from .selection import EIGHT_BIT, StateDtypes, check_codes, check_stored, random_fields, state_dtypes

__all__ = [
    "EIGHT_BIT",
    "Coded",
    "EightBit",
    "StateDtypes",
    "check_codes",
    "check_stored",
    "load",
    "random_fields",
    "state_dtypes",
    "store",
    "zeros",
]

Coded = Any
"""A field as it is stored: an array, or an `EightBit`."""


def zeros(ops: ArrayOps, field: Field, parameter: Array, dtype: str) -> Coded:
    """Return the field of a parameter that was never updated. dtype: from `state_dtypes`."""
    return initial(ops, field, parameter) if dtype == EIGHT_BIT else ops.zeros_like(parameter, dtype)


def load(ops: ArrayOps, stored: Coded, dtype: str) -> Array:
    """Return a field in the compute dtype."""
    return decoded(ops, stored) if isinstance(stored, EightBit) else ops.cast(stored, dtype)


def store(ops: ArrayOps, x: Array, like: Coded, bits: Array | None) -> Coded:
    """Return a field as it is stored.

    Args:
        ops: the framework's casts.
        x: the field in the compute dtype.
        like: as it was stored before.
        bits: of x's shape, words of `core.random_bits`; None for a field that is rounded to nearest.
    """
    if isinstance(like, EightBit):
        return encoded(ops, x, like, bits)
    dtype = ops.dtype_name(like)
    return ops.cast(x if bits is None else stochastically_rounded(ops, x, dtype, bits), dtype)
