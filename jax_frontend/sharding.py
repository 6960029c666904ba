"""Placing the state: its arrays are sharded as the parameters that they belong to, and stay so in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .buffers import is_concrete
from .state import PyTree


def _replicated(params: PyTree) -> NamedSharding | None:
    """Return the sharding that gives every device of params the whole array; None where params are on one device."""
    for leaf in jax.tree.leaves(params):
        if is_concrete(leaf) and isinstance(leaf.sharding, NamedSharding) and len(leaf.sharding.device_set) > 1:
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return None


def as_jit_returns(leaf: jax.Array) -> jax.Array:
    """Return an array with its sharding spelled as jax.jit spells that of its outputs, so that a step is traced only once."""
    if not is_concrete(leaf) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    return jax.device_put(leaf, _spelled(leaf.sharding, leaf.ndim))


def _spelled(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Return the sharding with an entry for each dimension on a mesh of explicit axes, without None at the end on others."""
    axes = list(sharding.spec)
    if AxisType.Explicit in sharding.mesh.axis_types:
        axes += [None] * (ndim - len(axes))
    else:
        while axes and axes[-1] is None:
            axes.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def sharded_like(new: PyTree, old: PyTree) -> PyTree:
    """Return a tree of traced arrays, each sharded as that of `old` in its place.

    Otherwise XLA chooses: a replicated moment comes back sharded, and the next step is compiled again.

    Args:
        new, old: trees; where their structures differ, new is returned as it is.
    """
    structure: Any = jax.tree.structure(old)
    if jax.device_count() == 1 or structure != jax.tree.structure(new):
        return new
    return jax.tree.map(lambda n, o: shard_alike(n, o)[0] if jnp.shape(n) == jnp.shape(o) else n, new, old)


def init_sharded_like(init: Callable[[PyTree], PyTree], params: PyTree, model: PyTree) -> PyTree:
    """Return init(params) with every array that belongs to a parameter sharded as that is, and all others replicated.

    An array belongs to the parameter whose path its own path ends with, as in state.exp_avg["w"] and params["w"], if it has
    that parameter's shape. It is made where it stays: no device has to hold the whole of it.

    Args:
        init: can be traced.
        params: concrete arrays or traced ones, some or all of the model's.
        model: all parameters of the model. Unless some of them are on several devices (`NamedSharding`), of this process or
            of others, init is simply called.
    """
    replicated = _replicated(model)
    if replicated is None:
        return init(params)
    owners = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def sharding(path: Any, leaf: Any) -> Any:
        suffixes = (tuple(path[start:]) for start in range(len(path) + 1))
        owner = next((owners[suffix] for suffix in suffixes if suffix in owners), None)
        if owner is None or owner.shape != leaf.shape or owner.sharding.device_set != replicated.device_set:
            return _spelled(replicated, leaf.ndim)
        return owner.sharding

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)


def replicate(tree: PyTree, params: PyTree) -> PyTree:
    """Return a tree of small arrays with those on one device copied to every device of params."""
    replicated = _replicated(params)
    if replicated is None:
        return tree

    def copy(leaf: Any) -> Any:
        if not is_concrete(leaf) or len(leaf.devices()) > 1:
            return leaf
        value = np.asarray(leaf)
        return jax.jit(lambda: jnp.asarray(value), out_shardings=replicated)()

    return jax.tree.map(copy, tree)
