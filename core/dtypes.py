"""The dtypes of parameters, and of the arithmetic, which follows from them."""

from __future__ import annotations

from .errors import UnsupportedTensorError

LOW_PRECISION = ("bfloat16", "float16")
PARAMETER_DTYPES = ("float64", "float32", *LOW_PRECISION)


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
