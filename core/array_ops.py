"""What the specification needs of a framework: its array namespace, and the casts that the array API lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .dtypes import compute_dtype

Array = Any
"""An array of any framework; the specification uses only functions that all of them have."""


class ArrayOps(Protocol):
    """The few operations on which frameworks differ. dtypes are named by strings: "float32", "bfloat16", "int16" ..."""

    @property
    def xp(self) -> Any:
        """The array namespace: sqrt, clip, where, mean, expm1, log, isfinite, all."""
        ...

    def dtype_name(self, x: Array) -> str:
        """Return the name of x's dtype."""
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """Convert x to `dtype`, rounding to nearest, ties to even."""
        ...

    def round_to(self, x: Array, dtype: str) -> Array:
        """Round x to a value of `dtype`, and keep x's dtype. A compiler must not remove the rounding."""
        ...

    def bitcast(self, x: Array, dtype: str) -> Array:
        """Read the bits of x as `dtype`, which has the same size."""
        ...

    def zeros_like(self, x: Array, dtype: str) -> Array:
        """Return zeros with x's shape and device."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str, beside: Array) -> Array:
        """Return zeros on the device of `beside`."""
        ...

    def largest(self, x: Array) -> Array:
        """Return the maxima over the last dimension, which is kept; NaN where there is one."""
        ...

    def padded(self, x: Array, count: int) -> Array:
        """Return x with zeros behind it in the last dimension."""
        ...

    def addmm(self, base: Array | None, left: Array, right: Array, beta: float = 1.0, alpha: float = 1.0) -> Array:
        """Return beta*base + alpha*(left @ right) in their dtype, the product summed in float32 at least. None: no base."""
        ...


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of that name; only "bfloat16" needs ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class NumpyOps:
    """`ArrayOps` for numpy."""

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

    def zeros(self, shape: Sequence[int], dtype: str, beside: Array) -> Array:
        return np.zeros(shape, numpy_dtype(dtype))

    def largest(self, x: Array) -> Array:
        return np.max(x, axis=-1, keepdims=True)

    def padded(self, x: Array, count: int) -> Array:
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])

    def addmm(self, base: Array | None, left: Array, right: Array, beta: float = 1.0, alpha: float = 1.0) -> Array:
        dtype = self.dtype_name(left)
        wide = compute_dtype(dtype)
        product = alpha * (self.cast(left, wide) @ self.cast(right, wide))
        return self.cast(product if base is None else beta * self.cast(base, wide) + product, dtype)


numpy_ops = NumpyOps()
