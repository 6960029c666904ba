"""The global norm of gradients, and clipping by it, without overflow wherever float32 can hold the norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import Range, check_number
from .array_ops import upcast
from .state import PyTree


class Squares(NamedTuple):
    """Sums of squares, as they are and scaled down, of which the second is used where the first overflows."""

    plain: jax.Array  # shape=()
    scaled: jax.Array  # shape=(), of elements divided by `_scale`; elements up to 1 are left out

    def __add__(self, other: Any) -> Squares:
        return Squares(self.plain + other.plain, self.scaled + other.scaled)

    @property
    def norm(self) -> jax.Array:
        """Euclidean norm of everything that was added; an infinity or a NaN stays one."""
        fits = self.plain < jnp.inf  # false of NaN
        return jnp.sqrt(jnp.where(fits, self.plain, self.scaled)) * jnp.where(fits, 1.0, _scale(self.plain.dtype))


def _scale(dtype: Any) -> float:
    return 2.0 ** (jnp.finfo(dtype).maxexp // 2 + 20)


def check_max_norm(max_norm: Any) -> None:
    """Raise `InvalidArgumentError` unless it is None or a number, or a 0-d array, in (0, inf)."""
    if max_norm is None:
        return
    check_number("max_norm", max_norm, Range(0.0, low_included=False))
    if jnp.shape(max_norm):
        raise InvalidArgumentError(f"max_norm has shape {jnp.shape(max_norm)}; it must be a number or a 0-d array.")


def norm_dtype(tree: PyTree) -> jnp.dtype:
    """Return the compute dtype of a tree: float64 where it has float64 leaves, otherwise float32."""
    dtypes = {jax.eval_shape(upcast, leaf).dtype for leaf in jax.tree.leaves(tree)}
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def no_squares(dtype: Any) -> Squares:
    """Return sums of squares of zero."""
    return Squares(jnp.zeros((), dtype), jnp.zeros((), dtype))


def squares(grads: PyTree, dtype: Any) -> Squares:
    """Return the sums of squares of all leaves; each leaf is read once, and is not needed afterwards."""
    total = no_squares(dtype)
    zero = jnp.zeros((), dtype)

    def add(these: Any, those: Any) -> Any:
        return these[0] + those[0], these[1] + those[1]

    for leaf in jax.tree.leaves(grads):
        leaf = upcast(leaf).astype(dtype)
        # Without leaving out small elements XLA would square first, and overflow.
        scaled = jnp.where(jnp.abs(leaf) <= 1, 0.0, leaf / _scale(dtype))
        both = (jnp.square(leaf), jnp.square(scaled))
        total += Squares(*lax.reduce(both, (zero, zero), add, tuple(range(leaf.ndim))))  # two sums in one pass
    return total


def global_norm(grads: PyTree) -> jax.Array:
    """Return the Euclidean norm of all gradients together, in the compute dtype of the tree."""
    return squares(grads, norm_dtype(grads)).norm


def clipped(grads: PyTree, norm: jax.Array, max_norm: float | None) -> PyTree:
    """Return grads * min(1, max_norm/norm), in their dtypes.

    Args:
        grads: of any floating-point dtypes.
        norm: their global norm. A NaN makes all gradients NaN, an infinity makes itself NaN and the others 0.
        max_norm: None returns the gradients as they are.
    """
    if max_norm is None:
        return grads
    # Two factors, as max_norm/norm may underflow; no division by them, since XLA would keep its result for the whole tree.
    root, one = jnp.sqrt(norm), jnp.ones_like(norm)
    first, second = (jnp.where(norm <= max_norm, one, factor) for factor in (1 / root, max_norm / root))
    return jax.tree.map(lambda g: (upcast(g) * first * second).astype(g.dtype), grads)
