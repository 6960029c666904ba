"""Pytrees whose leaves have a leading axis of layers or micro-batches, and the parts of a tree that can be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..state import PyTree


def at(tree: PyTree, index: Any) -> PyTree:
    """Return the slice of every leaf at an index of the leading axis."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


def put(tree: PyTree, slices: PyTree, index: Any) -> PyTree:
    """Return every leaf with a slice written into it; XLA does so in place where nothing reads the old one any more."""
    return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, slices)


def length(tree: PyTree) -> int:
    """Return the length of the leading axis."""
    return jnp.shape(jax.tree.leaves(tree)[0])[0]


def swap_leading_axes(tree: PyTree) -> PyTree:
    """Return every leaf with its two leading axes exchanged."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def add(these: PyTree, those: PyTree) -> PyTree:
    """Return the sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), these, those)


def cast_like(new: PyTree, old: PyTree) -> PyTree:
    """Return the leaves of `new` in the dtypes of those of `old`."""
    return jax.tree.map(lambda n, o: jnp.asarray(n).astype(o.dtype), new, old)


def scan_microbatches(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], carry: PyTree, xs: PyTree, count: int
) -> Any:
    """Return what lax.scan over micro-batches returns; a single micro-batch does not become a loop."""
    if count > 1:
        return lax.scan(function, carry, xs)
    carry, ys = function(carry, jax.tree.map(lambda leaf: leaf[0], xs))
    return carry, jax.tree.map(lambda leaf: leaf[None], ys)


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is floating-point, and can be differentiated."""
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype, jnp.floating))


def partition(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Return (floating-point leaves, all others) as two trees, each with None for the leaves of the other."""
    floats = jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, tree)
    others = jax.tree.map(lambda leaf: None if is_floating(leaf) else leaf, tree)
    return floats, others


def combine(floats: PyTree, others: PyTree) -> PyTree:
    """Return the tree that `partition` split."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda leaf: leaf is None)
