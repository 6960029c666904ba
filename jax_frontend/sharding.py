"""Placing the state: its arrays are sharded as the parameters that they belong to, and stay so in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.codings import EightBit
from ..core.codings.eight_bit import BLOCK
from ..core.errors import RefusedError
from .buffers import is_concrete
from .sharding_group import sharded_like_array
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

    Otherwise XLA would choose: a replicated moment may come back sharded, and the next step is then compiled again.

    Args:
        new, old: trees; where their structures differ, new is returned as it is.
    """
    structure: Any = jax.tree.structure(old)
    if jax.device_count() == 1 or structure != jax.tree.structure(new):
        return new
    return jax.tree.map(lambda n, o: sharded_like_array(n, o) if jnp.shape(n) == jnp.shape(o) else n, new, old)


def init_sharded_like(init: Callable[[PyTree], PyTree], params: PyTree, model: PyTree) -> PyTree:
    """Return init(params) with every array that belongs to a parameter sharded as that is, and all others replicated.

    An array belongs to the parameter whose path its own path ends with, as in state.exp_avg["w"] and params["w"], if it has
    that parameter's shape. The codes of a field in 8 bits do, too, and its scales are where their blocks are. It is made where
    it stays: no device has to hold the whole of it.

    Args:
        init: can be traced.
        params: concrete arrays or traced ones, some or all of the model's.
        model: all parameters of the model. Unless some of them are on several devices (`NamedSharding`), of this process or
            of others, init is simply called.

    Raises:
        RefusedError: a field is to be kept in 8 bits, and the parameter is cut within blocks.
    """
    replicated = _replicated(model)
    if replicated is None:
        return init(params)
    owners = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def sharding(path: Any, leaf: Any) -> Any:
        suffixes = (tuple(path[start:]) for start in range(len(path) + 1))
        name = next((suffix for suffix in suffixes if suffix in owners), None)
        owner = None if name is None else owners[name]
        shape = leaf.codes.shape if isinstance(leaf, EightBit) else leaf.shape
        if owner is None or owner.shape != shape or owner.sharding.device_set != replicated.device_set:
            return jax.tree.map(lambda each: _spelled(replicated, each.ndim), leaf)
        if not isinstance(leaf, EightBit):
            return owner.sharding
        scales = _sharding_of_scales(owner, leaf.scale.ndim, f"params{jax.tree_util.keystr(name or ())}")
        return EightBit(owner.sharding, scales)

    made = jax.eval_shape(init, params)
    shardings = jax.tree_util.tree_map_with_path(sharding, made, is_leaf=lambda node: isinstance(node, EightBit))
    return jax.jit(init, out_shardings=shardings)(params)


def _sharding_of_scales(owner: Any, ndim: int, name: str) -> NamedSharding:
    """Return the sharding of the scales of a coded field, with those of the parameter's blocks that a device holds.

    Args:
        owner: the parameter.
        ndim: of the scales, whose last two axes are rows and blocks of a row; an axis of layers may be before them.
        name: of the parameter, for the error.
    """
    sharding = owner.sharding
    axes = [*sharding.spec, *[None] * (owner.ndim - len(sharding.spec))]
    row, shard = ndim - 1, sharding.shard_shape(owner.shape)  # row: the first axis of a row
    cut = [axis for axis in range(row, owner.ndim) if shard[axis] != owner.shape[axis]]
    if cut and (length := math.prod(shard[cut[-1] :])) % BLOCK:
        raise RefusedError(
            f"{name} is sharded so that devices have {length} neighbouring elements of a row, not a multiple of the {BLOCK} "
            "that share a scale in 8 bits; shard another axis, such as the first one of a matrix, or leave mu_dtype='8bit' and "
            "nu_dtype='8bit' out."
        )
    return _spelled(NamedSharding(sharding.mesh, PartitionSpec(*axes[:row], axes[row] if cut == [row] else None)), ndim)


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
