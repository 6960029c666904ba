"""The states of penstock's transforms: NamedTuples of arrays, as Optax has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Stochastic(NamedTuple):
    """In place of the compensation of a parameter that is rounded stochastically, which keeps nothing."""


class RuleState(NamedTuple):
    """State of penstock's transforms: what the rule keeps for each parameter.

    Means of Adam and its relatives are debiased already: code that reads Optax's mu and nu, and debiases them, must not find
    these.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32: updates so far
    fields: dict[str, PyTree]  # by name ("exp_avg", "exp_avg_sq"), each like params; an `EightBit` where it is coded
    compensation: PyTree  # like params: int16 (split), int8 (split8), the parameter's dtype (kahan), `Stochastic` or None
    random_keys: PyTree = None  # like params: 0-d uint32, None where nothing is rounded stochastically; None if that is never


class RuleStateWithBetas(NamedTuple):
    """`RuleState` where b1 or b2 is an array, which may be another one in the next update (`optax.inject_hyperparams`)."""

    count: jax.Array  # type: ignore[assignment]
    fields: dict[str, PyTree]
    compensation: PyTree
    betas: dict[str, jax.Array]  # "beta1" and so on, each of shape (): that the fields are debiased by, of the last update
    random_keys: PyTree = None


RULE_STATES = (RuleState, RuleStateWithBetas)
AnyRuleState = RuleState | RuleStateWithBetas


class CompensatedState(NamedTuple):
    """State of `compensated`."""

    inner_state: PyTree  # of the wrapped transform
    compensation: PyTree  # like params: int16 (split) or the parameter's dtype (kahan); None where not compensated


def compensations_in(tree: PyTree) -> list[Any]:
    """Return the compensations of a tree like params, where there is one."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Stochastic))


def compensated_leaves(state: PyTree) -> int:
    """Return the number of parameters that have a compensation in an optimizer state."""
    kinds = (*RULE_STATES, CompensatedState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = 0
    for node in nodes:
        if isinstance(node, kinds):
            found += len(compensations_in(node.compensation))
        if isinstance(node, CompensatedState):
            found += compensated_leaves(node.inner_state)
    return found


def initial_tree(params: PyTree, leaves: list[Any]) -> PyTree:
    """Return the compensations, or the keys, of the leaves of params as a tree like it."""
    if type(params).__name__ == "_ParamsPlaceholder":
        # optax.tree_map_params finds by it the fields that are like params. Fields with None in them cannot be mapped
        # together with another tree; a single leaf is taken as "not like params", and left alone.
        return jnp.zeros(())
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
