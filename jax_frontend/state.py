"""The states of penstock's transforms: NamedTuples of arrays, as Optax has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class AdamState(NamedTuple):
    """State of `stable_adamw`, `adamw`, `adam` and `scale_by_stable_adam`."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32: updates so far
    mu: PyTree  # like params: debiased mean of the gradients, parameter's dtype unless mu_dtype
    nu: PyTree  # like params: debiased mean of their squares, parameter's dtype unless nu_dtype or too low
    compensation: PyTree  # like params: int16 (split) or the parameter's dtype (kahan); None where not compensated


class CompensatedState(NamedTuple):
    """State of `compensated`."""

    inner_state: PyTree  # of the wrapped transform
    compensation: PyTree  # like params: int16 (split) or the parameter's dtype (kahan); None where not compensated


def compensated_leaves(state: PyTree) -> int:
    """How many parameters have a compensation somewhere in this optimizer state."""
    kinds = (AdamState, CompensatedState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = 0
    for node in nodes:
        if isinstance(node, kinds):
            found += len(jax.tree.leaves(node.compensation))
        if isinstance(node, CompensatedState):
            found += compensated_leaves(node.inner_state)
    return found


def initial_compensation(params: PyTree, leaves: list[jax.Array | None]) -> PyTree:
    """The compensations of the leaves of params as a tree like it."""
    if type(params).__name__ == "_ParamsPlaceholder":
        # optax.tree_map_params asks with it which fields are like params. Fields with None in them cannot be mapped
        # together with another tree; as one leaf this one counts as "not like params" and is passed over as a whole.
        return jnp.zeros(())
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
