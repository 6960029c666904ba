"""The dtypes of the arithmetic and of the moments, which follow from the parameter's dtype."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError, UnsupportedTensorError

if TYPE_CHECKING:
    from .rules import Field

LOW_PRECISION = ("bfloat16", "float16")
PARAMETER_DTYPES = ("float64", "float32", *LOW_PRECISION)

BFLOAT16_SECOND_MOMENT_LIMIT = 2.0**-7
"""Smallest 1-beta2 for a bfloat16 second moment: a smaller decay rounds to nothing, and the moment never decays."""


StateDtypes = tuple[str, ...]
"""The dtypes of a rule's fields for one parameter, in their order."""


def compute_dtype(parameter_dtype: str) -> str:
    """Return the dtype of the arithmetic: float64 for float64 parameters, float32 for all others."""
    return "float64" if parameter_dtype == "float64" else "float32"


def check_parameter_dtype(
    parameter_dtype: str, described_as: str = "parameter", otherwise: str = "Leave it out of the optimizer"
) -> None:
    """Raise `UnsupportedTensorError` unless a parameter of this dtype can be optimized; `otherwise` is the remedy."""
    if parameter_dtype not in PARAMETER_DTYPES:
        raise UnsupportedTensorError(
            f"{described_as} has dtype {parameter_dtype}; penstock optimizes {', '.join(PARAMETER_DTYPES)}. "
            f"{otherwise}, or convert it (a complex tensor with torch.view_as_real or jnp.stack)."
        )


def squares_need_float32(dtype: str, beta: Any) -> bool:
    """Whether a mean of squares in this dtype would be wrong.

    float16 underflows (the square of g = 1e-4 is below its range), and bfloat16 does not decay if 1-beta < 2^-7. A beta that
    is not a Python number (traced, or on a device) is assumed to be too high.
    """
    if dtype == "float16":
        return True
    known = isinstance(beta, numbers.Real)
    return dtype == "bfloat16" and not (known and 1.0 - float(beta) >= BFLOAT16_SECOND_MOMENT_LIMIT)


def state_dtypes(
    fields: Sequence[Field],
    parameter_dtype: str,
    betas: Sequence[Any],
    asked: Sequence[str | None] | None = None,
    *,
    arguments: Sequence[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> StateDtypes:
    """Return the dtypes of a rule's fields: the parameter's own, or float32 for a mean of squares that needs it.

    Args:
        fields: of the rule.
        parameter_dtype: dtype of the parameter.
        betas: the decays of the fields, from `Rule.decays`.
        asked: the dtypes that the user has given, one a field; None means the default, also for one field.
        arguments: the names of the user's arguments for `asked`, for the errors; state_dtype where it is empty.
        names: how the frontend spells the hyperparameters, for the errors.

    Raises:
        InvalidArgumentError: a dtype is not a floating-point one, or cannot hold a mean of squares.
    """
    found = []
    for number, (field, beta) in enumerate(zip(fields, betas, strict=True)):
        dtype = asked[number] if asked else None
        argument = arguments[number] if arguments else "state_dtype"
        if dtype is not None and dtype not in PARAMETER_DTYPES:
            raise InvalidArgumentError(f"{argument}={dtype} is not possible; it must be one of {', '.join(PARAMETER_DTYPES)}.")
        if field.of_squares and dtype is not None and squares_need_float32(dtype, beta):
            highest, spelled = 1 - BFLOAT16_SECOND_MOMENT_LIMIT, names.get(field.beta or "", field.beta)
            why = {
                "float16": "a float16 second moment underflows",
                "bfloat16": f"a bfloat16 second moment never decays with {spelled}={beta} (it needs {spelled} <= {highest})",
            }[dtype]
            raise InvalidArgumentError(f"{argument}={dtype} is too low: {why}. Use {argument}=float32, or leave it out.")
        low = field.of_squares and squares_need_float32(parameter_dtype, beta)
        found.append(dtype or ("float32" if low else parameter_dtype))
    return tuple(found)
