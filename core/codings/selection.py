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
        InvalidArgumentError: a dtype is not known, or cannot hold a mean of squares; a coding of float32 numbers for a float64
            parameter.
    """
    found = []
    columns = zip(fields, betas, asked or (None,) * len(fields), arguments or ("state_dtype",) * len(fields), strict=True)
    for field, beta, dtype, argument in columns:
        check_state_dtype(field, parameter_dtype, dtype, argument)
        low = field.of_squares and squares_need_float32(parameter_dtype, beta)
        if dtype is None or (field.is_precise and dtype not in (compute_dtype(parameter_dtype), "float64")):
            dtype = "float32" if low else parameter_dtype
        found.append("float32" if dtype == EIGHT_BIT and shape is not None and not is_coded(shape) else dtype)
    return tuple(found)


def check_state_dtype(field: Field, parameter_dtype: str, asked: str | None, argument: str) -> None:
    """Raise `InvalidArgumentError` for a dtype that the user's argument cannot give a field."""
    if asked is None:
        return
    if asked not in STATE_DTYPES:
        raise InvalidArgumentError(f"{argument}={asked} is not possible; it must be one of {', '.join(STATE_DTYPES)}.")
    if field.of_squares and asked == "float16":
        raise InvalidArgumentError(
            f"{argument}=float16 is too low: a float16 second moment underflows. Use {argument}=float32 or bfloat16, or leave "
            "it out."
        )
    if parameter_dtype == "float64" and (asked == EIGHT_BIT or (field.of_squares and asked == "bfloat16")):
        raise InvalidArgumentError(
            f"{argument}={asked!r} is not possible for a float64 parameter, whose precision it would lose; leave it out, or "
            "convert the parameter to float32."
        )


def check_stored(
    fields: Sequence[Field],
    parameter_dtype: str,
    stored: StateDtypes,
    asked: Sequence[str | None],
    expected: Sequence[StateDtypes],
    *,
    arguments: Sequence[str],
    described: str,
) -> None:
    """Raise `InvalidArgumentError` if fields are stored in another coding than the user asked for, or has by default.

    Args:
        fields, parameter_dtype, asked, arguments: as for `state_dtypes`.
        stored: the dtypes that the fields have.
        expected: what `state_dtypes` returns for each shape that the whole parameter may have.
        described: the parameter, for the error.
    """
    for number, (field, dtype, given, argument) in enumerate(zip(fields, stored, asked, arguments, strict=True)):
        # By default a field may have had another decay when it was made.
        possible = {parameter_dtype, "float32"} if given is None else {dtypes[number] for dtypes in expected}
        if dtype not in possible:
            raise InvalidArgumentError(
                f"{field.name} of {described} is {dtype} in its state, which was made with another {argument} than {given}; "
                f"give {argument}={dtype}, or carry the state over with export_state and import_state."
            )


def check_codes(field: Field, codes: str, scale: str, described: str) -> None:
    """Raise `InvalidArgumentError` if the arrays of a field in 8 bits, of which the dtypes are given, were cast.

    Args:
        field: of the rule.
        codes, scale: dtypes of the arrays of an `EightBit`.
        described: the parameter, for the error.
    """
    kept = "uint8" if field.of_squares else "int8"
    if (codes, scale) != (kept, "float32"):
        raise InvalidArgumentError(
            f"{field.name} of {described} has {codes} codes and {scale} scales in its state, which was cast: they are {kept} "
            "and float32. Load the state again, and cast parameters alone."
        )
