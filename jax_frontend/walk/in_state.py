"""In-state accumulation (AdamA, https://arxiv.org/abs/2305.19982): micro-batch gradients go straight into the moments.

The first micro-batch decays the moments, later ones only add to them, and the last one also steps: the functions of
`core.update`, for the tensors of one layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...core import update as specification
from ...core.errors import RefusedError
from ..array_ops import jax_ops, widened
from ..state import AdamState, PyTree
from ..step import Leaf, RuleTransformation, leaves_of


class Moments(NamedTuple):
    """What micro-batches change of an optimizer state, like params each."""

    mu: PyTree
    nu: PyTree
    mean_square: PyTree  # a number for each tensor: the sum over the micro-batches so far


class Rest(NamedTuple):
    """What they leave as it is."""

    count: jax.Array  # type: ignore[assignment]
    compensation: PyTree


def check_in_state(tx: optax.GradientTransformation) -> None:
    """Raise `RefusedError` unless tx is one of penstock's own transforms, which know how to accumulate."""
    if not isinstance(tx, RuleTransformation) or tx.arguments.scales_only:
        raise RefusedError(
            "accumulation='state' is only possible for stable_adamw, adamw and adam of penstock, neither chained nor wrapped; "
            "leave accumulation out: microbatches alone work with every separable transform, and are exact."
        )


def taken_apart(state: AdamState, params: PyTree, stacked: bool) -> tuple[Moments, Rest]:
    """An optimizer state before the first micro-batch.

    Args:
        state, params: with a leading layer axis where stacked.
    """

    def zero(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape[:1] if stacked else (), jax.eval_shape(widened, leaf).dtype)

    return Moments(state.mu, state.nu, jax.tree.map(zero, params)), Rest(state.count, state.compensation)


def accumulate(tx: RuleTransformation, moments: Moments, rest: Rest, params: PyTree, grads: PyTree, *, first: bool) -> Moments:
    """One micro-batch into the moments of one layer; its number of updates stays."""
    _, treedef, leaves = _leaves(tx, moments, rest, params, grads)

    def one(leaf: Leaf | None) -> tuple[Any, ...]:
        if leaf is None:
            return None, None, None
        state = specification.accumulate(jax_ops, tx.rule, *leaf, first=first)
        return state.exp_avg, state.exp_avg_sq, state.mean_square

    return Moments(*_columns(treedef, [one(leaf) for leaf in leaves], 3))


def update_last(
    tx: RuleTransformation, moments: Moments, rest: Rest, params: PyTree, grads: PyTree
) -> tuple[PyTree, AdamState]:
    """The last micro-batch of one layer, and the step: its new parameters and state."""
    count, treedef, leaves = _leaves(tx, moments, rest, params, grads)

    def one(leaf: Leaf | None) -> tuple[Any, ...]:
        if leaf is None:
            return None, None, None, None
        parameter, state = specification.update(jax_ops, tx.rule, *leaf, first=False)
        return parameter, state.exp_avg, state.exp_avg_sq, state.compensation

    new, mu, nu, compensation = _columns(treedef, [one(leaf) for leaf in leaves], 4)
    return new, AdamState(count, mu, nu, compensation)


def _columns(treedef: Any, rows: list[tuple[Any, ...]], count: int) -> list[PyTree]:
    return [treedef.unflatten([row[i] for row in rows]) for i in range(count)]


def _leaves(
    tx: RuleTransformation, moments: Moments, rest: Rest, params: PyTree, grads: PyTree
) -> tuple[jax.Array, Any, list[Leaf | None]]:
    state = AdamState(rest.count, moments.mu, moments.nu, rest.compensation)
    count, treedef, leaves = leaves_of(tx.rule, tx.arguments, grads, state, params)
    squares = treedef.flatten_up_to(moments.mean_square)

    def summed(leaf: Leaf | None, square: Any) -> Leaf | None:
        return leaf and leaf._replace(state=leaf.state._replace(mean_square=square))

    return count, treedef, list(map(summed, leaves, squares))
