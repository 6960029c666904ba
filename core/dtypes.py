"""The dtypes of the arithmetic and of the moments, which follow from the parameter's dtype."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from .errors import InvalidArgumentError, UnsupportedTensorError

LOW_PRECISION = ("bfloat16", "float16")
PARAMETER_DTYPES = ("float64", "float32", *LOW_PRECISION)

BFLOAT16_SECOND_MOMENT_LIMIT = 2.0**-7
"""Smallest 1-beta2 for a bfloat16 second moment: a smaller decay rounds to nothing, and the moment never decays."""


class StateDtypes(NamedTuple):
    """The dtypes of the two moments of one parameter."""

    exp_avg: str
    exp_avg_sq: str


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


def second_moment_needs_float32(state_dtype: str, beta2: Any) -> bool:
    """Whether exp_avg_sq in `state_dtype` would be wrong.

    float16 underflows (the square of g = 1e-4 is below its range), and bfloat16 does not decay if 1-beta2 < 2^-7. A beta2 that
    is not a Python number (traced, or on a device) is assumed to be too high.
    """
    if state_dtype == "float16":
        return True
    known = isinstance(beta2, numbers.Real)
    return state_dtype == "bfloat16" and not (known and 1.0 - float(beta2) >= BFLOAT16_SECOND_MOMENT_LIMIT)


def state_dtypes(
    parameter_dtype: str,
    beta2: Any,
    exp_avg: str | None = None,
    exp_avg_sq: str | None = None,
    *,
    argument: str = "state_dtype",
    beta2_argument: str = "beta2",
) -> StateDtypes:
    """Return the dtypes of a parameter's moments: the parameter's own, or float32 for a second moment that needs it.

    Args:
        parameter_dtype: dtype of the parameter.
        beta2: decay of the second moment.
        exp_avg: requested dtype of the first moment; None means the parameter's.
        exp_avg_sq: requested dtype of the second moment; None means the parameter's, or float32 if that is too low.
        argument: name of the user's argument for `exp_avg_sq`, for the error.
        beta2_argument: name of the user's argument for `beta2`, for the error.

    Raises:
        InvalidArgumentError: the requested dtype cannot hold the second moment, or is not a floating-point dtype.
    """
    for asked in (exp_avg, exp_avg_sq):
        if asked is not None and asked not in PARAMETER_DTYPES:
            raise InvalidArgumentError(f"{argument}={asked} is not possible; it must be one of {', '.join(PARAMETER_DTYPES)}.")
    if exp_avg_sq is not None and second_moment_needs_float32(exp_avg_sq, beta2):
        highest = 1 - BFLOAT16_SECOND_MOMENT_LIMIT
        why = {
            "float16": "a float16 second moment underflows",
            "bfloat16": (
                f"a bfloat16 second moment never decays with {beta2_argument}={beta2} (it needs {beta2_argument} <= {highest})"
            ),
        }[exp_avg_sq]
        raise InvalidArgumentError(f"{argument}={exp_avg_sq} is too low: {why}. Use {argument}=float32, or leave it out.")
    second = exp_avg_sq
    if second is None:
        second = "float32" if second_moment_needs_float32(parameter_dtype, beta2) else parameter_dtype
    return StateDtypes(exp_avg or parameter_dtype, second)
