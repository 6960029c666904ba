"""Where arrays lie in memory: what is donated may be given only once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..core.errors import InvalidArgument
from .state import PyTree

Buffer = tuple[Any, int]
"""A device and the address on it."""


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is an array in memory, not a traced one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def buffers(leaf: Any) -> set[Buffer]:
    """Where a concrete array lies in memory, on each of its devices."""
    if not is_concrete(leaf) or leaf.size == 0:
        return set()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    devices = leaf.devices()
    if len(devices) == 1 and leaf.is_fully_addressable:
        return {(next(iter(devices)), leaf.unsafe_buffer_pointer())}
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}


def strong(leaf: Any) -> Any:
    """A concrete array that is weakly typed (jnp.asarray(1.0)) as a copy that is not: what comes out of a jitted update is
    not either, and the next call would compile again."""
    return lax.convert_element_type(leaf, leaf.dtype) if is_concrete(leaf) and leaf.weak_type else leaf


def check_donated(donated: dict[str, PyTree], kept: dict[str, PyTree]) -> None:
    """Raise `InvalidArgument` unless every array of `donated` is alive and shares its memory with no other one.

    Args:
        donated: by name.
        kept: what goes into the same call and stays; it may share memory within itself. By name.
    """
    leaves = jax.tree.leaves((donated, kept))
    if not any(is_concrete(leaf) and leaf.is_deleted() for leaf in leaves):
        own = [buffers(leaf) for leaf in jax.tree.leaves(donated)]
        others: set[Buffer] = set().union(*(buffers(leaf) for leaf in jax.tree.leaves(kept)))
        if len(set().union(*own, others)) == sum(map(len, own)) + len(others):
            return
    owners: dict[Buffer, str] = {}
    for names, claims in ((donated, True), (kept, False)):
        for root, tree in names.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = root + jax.tree_util.keystr(path)
                if is_concrete(leaf) and leaf.is_deleted():
                    raise InvalidArgument(f"{name} was donated to an earlier update; use what that update returned.")
                held = buffers(leaf)
                for buffer in held & owners.keys():
                    raise InvalidArgument(
                        f"{owners[buffer]} and {name} are the same memory, which can be donated only once; give one of "
                        "them its own with jnp.copy."
                    )
                if claims:
                    owners.update(dict.fromkeys(held, name))
