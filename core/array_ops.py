"""What the specification needs of a framework: its array namespace, and the casts the array API has no words for."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = Any
"""An array of any framework; the specification only uses functions that all of them share."""


class ArrayOps(Protocol):
    """The few operations on which frameworks differ. dtypes are named by strings: "float32", "bfloat16", "int16" ..."""

    @property
    def xp(self) -> Any:
        """The array namespace: sqrt, clip, where, mean, expm1, log, isfinite, all."""
        ...

    def dtype_name(self, x: Array) -> str:
        """The name of x's dtype."""
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """x in `dtype`, rounded to nearest, ties to even."""
        ...

    def round_to(self, x: Array, dtype: str) -> Array:
        """x rounded to what `dtype` can hold, still in x's dtype; a compiler must not remove the rounding."""
        ...

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The bits of x read as `dtype`, which has the same width."""
        ...

    def zeros_like(self, x: Array, dtype: str) -> Array:
        """Zeros of x's shape and place."""
        ...


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of that name; "bfloat16" comes from ml_dtypes, which is only needed then."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class NumpyOps:
    """`ArrayOps` for numpy: the specification run as it is written."""

    xp = np

    def dtype_name(self, x: Array) -> str:
        return np.asarray(x).dtype.name

    def cast(self, x: Array, dtype: str) -> Array:
        """A value beyond the range of `dtype` becomes an infinity, as on every device."""
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(numpy_dtype(dtype))

    def round_to(self, x: Array, dtype: str) -> Array:
        return self.cast(x, dtype).astype(np.asarray(x).dtype)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return np.asarray(x).view(numpy_dtype(dtype))

    def zeros_like(self, x: Array, dtype: str) -> Array:
        return np.zeros(np.shape(x), numpy_dtype(dtype))


numpy_ops = NumpyOps()
