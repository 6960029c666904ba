"""Which coding each field of a parameter has: what the user asked for, or what the parameter's dtype needs."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from ..dtypes import PARAMETER_DTYPES, compute_dtype
from ..errors import InvalidArgumentError
from ..rules import Field
from .eight_bit import is_coded

EIGHT_BIT = "8bit"
"""The name, among dtypes, of `core.codings.eight_bit`."""

STATE_DTYPES = (*PARAMETER_DTYPES, EIGHT_BIT)
"""What the user can ask for."""

StateDtypes = tuple[str, ...]
"""The dtypes of a rule's fields for one parameter, in their order; `EIGHT_BIT` where they are coded."""

LOWEST_DECAY = 2.0**-7
"""Smallest 1-beta2 of a mean of squares in bfloat16: a smaller decay is rounded to nothing, and the mean never decays."""


def squares_need_float32(dtype: str, beta: Any) -> bool:
    """Whether a mean of squares in this dtype, rounded to nearest, would be wrong.

    float16 underflows (the square of g = 1e-4 is below its range), and bfloat16 does not decay if 1-beta < 2^-7. A beta that
    is not a Python number (traced, or on a device) is assumed to be too high.
    """
    if dtype == "float16":
        return True
    known = isinstance(beta, numbers.Real)
    return dtype == "bfloat16" and not (known and 1.0 - float(beta) >= LOWEST_DECAY)


def random_fields(fields: Sequence[Field], dtypes: StateDtypes, decays: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers, from 1 on, of the fields that are rounded stochastically.

    They are means of squares: rounded to nearest, they would not decay, or not follow their gradients.

    Args:
        fields: of the rule.
        dtypes: from `state_dtypes`.
        decays: from `Rule.decays`.
    """
    found = []
    for number, (field, dtype, decay) in enumerate(zip(fields, dtypes, decays, strict=True), 1):
        if field.of_squares and (dtype == EIGHT_BIT or (dtype == "bfloat16" and squares_need_float32(dtype, decay))):
            found.append(number)
    return tuple(found)


def state_dtypes(
    fields: Sequence[Field],
    parameter_dtype: str,
    betas: Sequence[Any],
    asked: Sequence[str | None] | None = None,
    *,
    shape: Sequence[int] | None = None,
    arguments: Sequence[str] = (),
) -> StateDtypes:
    """Return the dtypes of a rule's fields: the parameter's own, or float32 for a mean of squares that needs it.

    Args:
        fields: of the rule.
        parameter_dtype: dtype of the parameter.
        betas: the decays of the fields, from `Rule.decays`.
        asked: the dtypes that the user has given, one a field; None means the default, also for one field. A field that
            `is_precise` has the default instead of a lower dtype.
        shape: of the whole parameter, or of one layer of a stack. Where `eight_bit.is_coded` says no, fields for which 8 bits
            are asked are float32. None: of a large matrix.
        arguments: the names of the user's arguments for `asked`, for the errors; state_dtype where it is empty.

    Raises:
        InvalidArgumentError: a dtype is not known, or cannot hold a mean of squares; 8 bits for a float64 parameter.
    """
    found = []
    for number, (field, beta) in enumerate(zip(fields, betas, strict=True)):
        dtype = asked[number] if asked else None
        argument = arguments[number] if arguments else "state_dtype"
        if dtype is not None and dtype not in STATE_DTYPES:
            raise InvalidArgumentError(f"{argument}={dtype} is not possible; it must be one of {', '.join(STATE_DTYPES)}.")
        if field.of_squares and dtype == "float16":
            raise InvalidArgumentError(
                f"{argument}=float16 is too low: a float16 second moment underflows. Use {argument}=float32 or bfloat16, or "
                "leave it out."
            )
        if dtype == EIGHT_BIT and parameter_dtype == "float64":
            raise InvalidArgumentError(
                f"{argument}='8bit' is not possible for a float64 parameter, whose precision it would lose; leave it out, or "
                "convert the parameter to float32."
            )
        if field.is_precise and dtype not in (compute_dtype(parameter_dtype), "float64"):
            dtype = None
        low = field.of_squares and squares_need_float32(parameter_dtype, beta)
        if dtype == EIGHT_BIT and not (shape is None or is_coded(shape)):
            dtype = "float32"
        found.append(dtype or ("float32" if low else parameter_dtype))
    return tuple(found)
