"""Arrays between devices and numpy, of one process or of several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.errors import InvalidArgumentError
from ..buffers import check_alive, is_concrete
from ..state import PyTree


def check_readable(tree: PyTree) -> None:
    """Raise `InvalidArgumentError` unless all arrays of a state are in memory, in dtypes that can be made here."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = f"state{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, np.ndarray | np.generic) and not is_concrete(leaf):
            raise InvalidArgumentError(
                f"{name} is {type(leaf).__name__}, not an array in memory; give what init_train_state made, and do not call "
                "this inside of jax.jit."
            )
        check_alive(leaf, name)
        if leaf.dtype.name == "float64" and jnp.result_type(float) != leaf.dtype:
            raise InvalidArgumentError(f"{name} is {leaf.dtype}; set jax_enable_x64, as where it was made.")


def to_host(leaf: Any) -> np.ndarray:
    """Return the whole array as numpy's; where it is sharded over several processes, all of them must call this."""
    if is_concrete(leaf) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def placed(array: np.ndarray, like: Any) -> jax.Array:
    """Return the array with the sharding of another one, in memory of its own, so that it can be donated."""
    if not is_concrete(like) or (len(like.sharding.device_set) == 1 and not getattr(like, "committed", True)):
        return jnp.array(array)
    # A copy: an array made of numpy's memory may share it.
    return jnp.copy(jax.make_array_from_callback(array.shape, like.sharding, lambda index: np.asarray(array[index])))
