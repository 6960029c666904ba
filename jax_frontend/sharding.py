"""Where the optimizer state lies: each array of it beside the parameter that it belongs to, on one device or on many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .buffers import is_concrete
from .state import PyTree


def everywhere(params: PyTree) -> NamedSharding | None:
    """The sharding that gives every device of params the whole array; None where no parameter lies on several devices."""
    for leaf in jax.tree.leaves(params):
        if is_concrete(leaf) and isinstance(leaf.sharding, NamedSharding) and len(leaf.sharding.device_set) > 1:
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return None


def made_beside(make: Callable[[PyTree], PyTree], params: PyTree, model: PyTree) -> PyTree:
    """make(params), where an array that belongs to a parameter is sharded as that is; all others are on every device.

    An array belongs to the parameter whose path its own path ends with, as in state.mu["w"] and params["w"], if it has that
    parameter's shape. It is made where it stays: no device has to hold a whole one.

    Args:
        make: can be traced.
        params: concrete arrays or traced ones, some or all of the model's.
        model: all parameters of the model. Unless some of them lie on several devices (`NamedSharding`), of this process or
            of others, make is simply called.
    """
    rest = everywhere(model)
    if rest is None:
        return make(params)
    owners = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def sharding(path: Any, leaf: Any) -> Any:
        suffixes = (tuple(path[start:]) for start in range(len(path) + 1))
        owner = next((owners[suffix] for suffix in suffixes if suffix in owners), None)
        if owner is None or owner.shape != leaf.shape or owner.sharding.device_set != rest.device_set:
            return rest
        return owner.sharding

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(make, params))
    return jax.jit(make, out_shardings=shardings)(params)


def put_everywhere(tree: PyTree, params: PyTree) -> PyTree:
    """A tree of small arrays, those on one device copied to every device of params; as it is where params lie on one."""
    rest = everywhere(params)
    if rest is None:
        return tree

    def put(leaf: Any) -> Any:
        value = None if not is_concrete(leaf) or len(leaf.devices()) > 1 else np.asarray(leaf)
        return leaf if value is None else jax.jit(lambda: jnp.asarray(value), out_shardings=rest)()

    return jax.tree.map(put, tree)
