"""The states of penstock's transforms: NamedTuples of arrays, as Optax has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class AdamState(NamedTuple):
    """State of `stable_adamw`, `adamw`, `adam` and `scale_by_stable_adam`.

    Its moments are debiased already: what reads Optax's mu and nu, and debiases them, must not find these.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32: updates so far
    exp_avg: PyTree  # like params: debiased mean of the gradients, parameter's dtype unless mu_dtype
    exp_avg_sq: PyTree  # like params: debiased mean of their squares, parameter's dtype unless nu_dtype or too low
    compensation: PyTree  # like params: int16 (split) or the parameter's dtype (kahan); None where not compensated


class AdamStateWithBetas(NamedTuple):
    """`AdamState` where b1 or b2 is an array, which may be another one in the next update (`optax.inject_hyperparams`)."""

    count: jax.Array  # type: ignore[assignment]
    exp_avg: PyTree
    exp_avg_sq: PyTree
    compensation: PyTree
    b1: jax.Array  # shape=(): that exp_avg is debiased under, of the last update
    b2: jax.Array  # shape=(): that exp_avg_sq is debiased under


ADAM_STATES = (AdamState, AdamStateWithBetas)
AnyAdamState = AdamState | AdamStateWithBetas


class CompensatedState(NamedTuple):
    """State of `compensated`."""

    inner_state: PyTree  # of the wrapped transform
    compensation: PyTree  # like params: int16 (split) or the parameter's dtype (kahan); None where not compensated


def compensated_leaves(state: PyTree) -> int:
    """Return the number of parameters that have a compensation in an optimizer state."""
    kinds = (*ADAM_STATES, CompensatedState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = 0
    for node in nodes:
        if isinstance(node, kinds):
            found += len(jax.tree.leaves(node.compensation))
        if isinstance(node, CompensatedState):
            found += compensated_leaves(node.inner_state)
    return found


def initial_compensation(params: PyTree, leaves: list[jax.Array | None]) -> PyTree:
    """Return the compensations of the leaves of params as a tree like it."""
    if type(params).__name__ == "_ParamsPlaceholder":
        # optax.tree_map_params finds by it the fields that are like params. Fields with None in them cannot be mapped
        # together with another tree; a single leaf is taken as "not like params", and left alone.
        return jnp.zeros(())
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
