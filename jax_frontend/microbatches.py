"""Splitting a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import InvalidArgumentError
from .state import PyTree


def check_microbatches(microbatches: Any, whole: Any) -> None:
    """Raise `InvalidArgumentError` unless `microbatches` is a positive integer, and `whole` a collection of names."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidArgumentError(f"microbatches={microbatches!r} is not possible; it must be an integer in [1, inf).")
    if isinstance(whole, str) or not isinstance(whole, Collection) or not all(isinstance(name, str) for name in whole):
        raise InvalidArgumentError(f"whole={whole!r} is not possible; it must be names in the batch, such as ('positions',).")


def chunks(batch: PyTree, microbatches: int, whole: Collection[str] = ()) -> PyTree:
    """Return the batch with two axes (microbatches, rest) for its leading one.

    A single typed PRNG key is split, and what `whole` names is repeated.

    Args:
        batch: a tree of arrays.
        microbatches: number of micro-batches.
        whole: names of arrays or subtrees of the batch, their paths joined by dots.

    Raises:
        InvalidArgumentError: a leaf that cannot be split evenly, or has another number of rows than the others; a name that is
            not in the batch; a batch without arrays.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise InvalidArgumentError("batch has no arrays; give the model at least one.")
    names = {path: jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves}
    for name in whole:
        if not any(_within(found, name) for found in names.values()):
            raise InvalidArgumentError(f"whole={tuple(whole)!r} names {name!r}; the batch has {[*names.values()]}.")
    if microbatches == 1:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batch)
    rows: dict[int, Any] = {}  # the path of a leaf by its number of rows

    def split(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if any(_within(names[path], each) for each in whole):
            return jnp.broadcast_to(leaf, (microbatches, *leaf.shape))
        if not leaf.shape and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf, microbatches)
        if not leaf.shape or leaf.shape[0] % microbatches:
            raise InvalidArgumentError(
                f"microbatches={microbatches} does not divide the leading axis of batch{jax.tree_util.keystr(path)}, which has "
                f"shape {leaf.shape}; give every array of the batch a leading axis of rows, a multiple of microbatches."
                f"{_remedy(names[path], leaf)}"
            )
        rows.setdefault(leaf.shape[0], path)
        if len(rows) > 1:
            (most, one), (least, other) = sorted(rows.items(), reverse=True)
            raise InvalidArgumentError(
                f"batch{jax.tree_util.keystr(one)} has {most} rows and batch{jax.tree_util.keystr(other)} {least}; split into "
                f"microbatches={microbatches}, they would not belong together. Give all arrays as many rows."
                f"{_remedy(names[other])}"
            )
        # A micro-batch is every microbatches-th row, so that rows sharded over devices stay there.
        return jnp.swapaxes(jnp.reshape(leaf, (leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split, batch)


def _within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _remedy(name: str, leaf: jax.Array | None = None) -> str:
    """Return how to give an array to every micro-batch whole; nothing for a batch that is a single array."""
    if leaf is not None and leaf.shape == (2,) and leaf.dtype == jnp.uint32:
        return " A PRNG key is split into one for each micro-batch if jax.random.key made it, instead of jax.random.PRNGKey."
    return f" What each micro-batch needs as it is, name in whole=({name!r},)." if name else ""
