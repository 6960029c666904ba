"""The array operations of the specification, in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.array_ops import Array
from ..core.dtypes import check_parameter_dtype, compute_dtype

_FLOAT16_SMALLEST_NORMAL = 2.0**-14
_FLOAT16_SUBNORMAL_SPACING = 2.0**-24


class JaxOps:
    """`core.array_ops.ArrayOps` for JAX: every operation can be traced, vectorised and sharded."""

    xp = jnp

    def dtype_name(self, x: Array) -> str:
        return jnp.result_type(x).name

    def cast(self, x: Array, dtype: str) -> Array:
        return jnp.asarray(x).astype(dtype)

    def round_to(self, x: Array, dtype: str) -> Array:
        """Round with operations that XLA never removes, as it does a pair of casts."""
        if dtype == "bfloat16":
            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        if dtype == "float16":
            normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
            # reduce_precision flushes subnormals to zero; float16 has them, and a cast keeps them.
            subnormal = jnp.rint(x / _FLOAT16_SUBNORMAL_SPACING) * _FLOAT16_SUBNORMAL_SPACING
            return jnp.where(jnp.abs(x) < _FLOAT16_SMALLEST_NORMAL, subnormal, normal)
        return x.astype(dtype).astype(x.dtype)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return lax.bitcast_convert_type(x, jnp.dtype(dtype))

    def zeros_like(self, x: Array, dtype: str) -> Array:
        """Return zeros with the shape and sharding of x."""
        return jnp.zeros_like(x, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: str, beside: Array) -> Array:
        return jnp.zeros(shape, dtype)

    def largest(self, x: Array) -> Array:
        return jnp.max(x, axis=-1, keepdims=True)

    def padded(self, x: Array, count: int) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])

    def addmm(self, base: Array | None, left: Array, right: Array, beta: float = 1.0, alpha: float = 1.0) -> Array:
        """In full precision, also on devices whose products of float32 are of a lower one by default."""
        wide = compute_dtype(self.dtype_name(left))
        how: dict[str, Any] = {"precision": lax.Precision.HIGHEST, "preferred_element_type": wide}
        if (sharding := _sharding_of_product(left, right)) is not None:
            how["out_sharding"] = sharding
        product = alpha * jnp.einsum("ij,jk->ik", left, right, **how)
        return (product if base is None else beta * base.astype(wide) + product).astype(left.dtype)


jax_ops = JaxOps()


def _sharding_of_product(left: Array, right: Array) -> NamedSharding | None:
    """Return the sharding of a product over explicit mesh axes, where jax leaves the choice to its caller: the rows as those of
    left, the columns as those of right unless the rows have one of their axes. None where neither is sharded so."""
    sharding, other = jax.typeof(left).sharding, jax.typeof(right).sharding
    if not any(sharding.spec) and not any(other.spec):
        return None
    rows, columns = sharding.spec[0], other.spec[1]
    taken = {rows} if isinstance(rows, str) else set(rows or ())
    columns = None if taken.intersection({columns} if isinstance(columns, str) else columns or ()) else columns
    return NamedSharding(sharding.mesh if any(sharding.spec) else other.mesh, PartitionSpec(rows, columns))


NOT_TRAINED = "Give what the model reads and does not train as part of the batch, or to the loss function by closure"
"""The remedy for integers, keys and quantized weights: no mask excludes them from what is differentiated."""


def zeros_of(kinds: Any) -> Any:
    """Return a tree of zeros of jax.ShapeDtypeStructs, sharded as these are on a mesh of explicit axes."""
    return jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype, device=kind.sharding), kinds)


def upcast(x: Array) -> Array:
    """Return x in its compute dtype."""
    return jax_ops.cast(x, compute_dtype(jax_ops.dtype_name(x)))


def check_floating(params: Any) -> None:
    """Raise `UnsupportedTensorError` unless all parameters of a tree are of floating-point dtypes that can be optimized."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_parameter_dtype(jnp.result_type(leaf).name, f"params{jax.tree_util.keystr(path)}", NOT_TRAINED)
