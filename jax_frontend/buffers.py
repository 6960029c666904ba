"""The memory of arrays: its addresses, and whether it was deleted."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..core.errors import InvalidArgumentError
from .state import PyTree

Buffer = tuple[Any, int]
"""A device and the address on it."""


def is_concrete(leaf: Any) -> bool:
    """Return whether a leaf is an array in memory, not a traced one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def is_array_like(leaf: Any) -> bool:
    """Return whether a leaf is an array, of JAX or of numpy, or a number."""
    return hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__") or isinstance(leaf, numbers.Number)


def buffers(leaf: Any) -> set[Buffer]:
    """Return the buffers of a concrete array, on each of its devices."""
    if not is_concrete(leaf) or leaf.size == 0:
        return set()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    devices = leaf.devices()
    if len(devices) == 1 and leaf.is_fully_addressable:
        return {(next(iter(devices)), leaf.unsafe_buffer_pointer())}
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}


def check_alive(leaf: Any, name: str, *, donated: bool = True) -> None:
    """Raise `InvalidArgumentError` if a leaf is an array that was deleted.

    Args:
        leaf: any leaf.
        name: its name in the error.
        donated: the leaf is of an argument that is donated, and returned by the call.
    """
    if is_concrete(leaf) and leaf.is_deleted():
        if donated:
            raise InvalidArgumentError(f"{name} was donated to an earlier update; use what that update returned.")
        raise InvalidArgumentError(f"{name} was deleted by an earlier call; compute it again, or give that call a copy.")


def strong(leaf: Any) -> Any:
    """Return a weakly typed array (jnp.asarray(1.0)) as one that is not, and any other leaf as it is."""
    return lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def typed_like(old: PyTree, new: PyTree) -> PyTree:
    """Return the tree `new`, weakly typed where `old` is, so that the next call with it is not compiled again.

    Args:
        old, new: trees of arrays; where their structures, dtypes or shapes differ, new is returned as it is.
    """

    def leaf(old: Any, new: Any) -> Any:
        if not getattr(old, "weak_type", False):
            return new
        new = jnp.asarray(new)
        if (new.dtype, new.shape) != (old.dtype, old.shape):
            return new
        fill = lax.full_like  # weakly typed where its first argument is
        for _ in range(new.ndim):
            fill = jax.vmap(fill)
        return fill(old, new)

    structure: Any = jax.tree.structure(old)
    return jax.tree.map(leaf, old, new) if structure == jax.tree.structure(new) else new
