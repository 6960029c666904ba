"""The rules of one tree of parameters: that of a transform of penstock, or of several that optax.partition makes one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from ...core.errors import RefusedError
from ..direct import as_transformation, sources_of
from ..rule_transform import RuleTransformation, transformation
from ..state import RULE_STATES, PyTree, Stochastic

_NOT_POSSIBLE = (
    "accumulation='state' is only possible for penstock's own transforms, and optax.partition of them, neither chained nor "
    "wrapped; leave accumulation out: microbatches alone work with every separable transform, and are exact."
)
_EXACT = "leave accumulation out: microbatches alone are exact"


@dataclasses.dataclass(frozen=True)
class Member:
    """A transform, and which leaves of the parameters it updates.

    Args:
        tx: None where it updates none.
        numbers: of the leaves.
    """

    tx: RuleTransformation | None
    numbers: frozenset[int]

    def part(self, tree: PyTree) -> PyTree:
        """Return a tree like the parameters as the transform gets it: without the leaves of others."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten([leaf if i in self.numbers else optax.MaskedNode() for i, leaf in enumerate(leaves)])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Members:
    """The transforms of a tree of parameters, each of whose leaves has one; a pytree without leaves."""

    each: tuple[Member, ...]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, params: PyTree, state: PyTree) -> Members:
        """Return the members of a transform.

        Args:
            tx: the transform.
            params: arrays or jax.ShapeDtypeStructs, of one layer.
            state: of tx, also with a layer axis.

        Raises:
            RefusedError: it is, or has, another than penstock's, or one that cannot accumulate.
        """
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        if isinstance(tx, RuleTransformation):
            found = [Member(tx, frozenset(range(len(paths))))]
        else:
            arguments = {path: source.arguments for path, source in sources_of(tx, params).items()}
            found = []
            for node in rule_states(state):
                own = {path for path, _ in jax.tree_util.tree_leaves_with_path(node.compensation, is_leaf=_is_leaf)}
                numbers = frozenset(i for i, path in enumerate(paths) if path in own)
                known = {id(arguments[paths[i]]): arguments[paths[i]] for i in numbers if paths[i] in arguments}
                if len(known) > 1 or (numbers and not known):
                    raise RefusedError(_NOT_POSSIBLE)
                found.append(Member(transformation(*known.values()) if known else None, numbers))
        if sorted(i for member in found for i in member.numbers) != list(range(len(paths))):
            raise RefusedError(_NOT_POSSIBLE)
        for member in found:
            if member.tx is not None:
                check_accumulates(member.tx)
        return cls(tuple(found))

    def joined(self, parts: tuple[PyTree, ...], like: PyTree) -> PyTree:
        """Return the tree of which the members have these parts."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(like)
        for member, part in zip(self.each, parts, strict=True):
            for number, leaf in zip(sorted(member.numbers), jax.tree.leaves(part), strict=True):
                leaves[number] = leaf
        return treedef.unflatten(leaves)


def check_accumulates(tx: RuleTransformation) -> None:
    """Raise `RefusedError` unless micro-batches can enter the state of a transform one by one."""
    if tx.arguments.scales_only:
        raise RefusedError(_NOT_POSSIBLE)
    tx.rule.check_accumulates(_EXACT)


def check_in_state(tx: optax.GradientTransformation) -> None:
    """Raise `RefusedError` if a transform cannot accumulate; what depends on the parameters `Members.of` checks."""
    if isinstance(tx, RuleTransformation):
        check_accumulates(tx)
        return
    try:
        state = as_transformation(tx).init({})
    except Exception:  # its labels are a function of the parameters, which has not got any here
        return
    rule_states(state)


def rule_states(state: PyTree) -> list[Any]:
    """Return the states of penstock's transforms in the state of a transform, which consists of these alone.

    Raises:
        RefusedError: there is another transform in it, with a state or without.
    """
    if isinstance(state, RULE_STATES):
        return [state]
    kind = type(state).__name__
    if kind in ("PartitionState", "MultiTransformState"):
        return [found for inner in state.inner_states.values() for found in rule_states(inner)]
    if kind == "MaskedState":
        return rule_states(state.inner_state)
    raise RefusedError(_NOT_POSSIBLE)


def with_rule_states(state: PyTree, new: list[Any]) -> PyTree:
    """Return the state of a transform with others in place of its `rule_states`."""
    return jax.tree.unflatten(jax.tree.structure(state, is_leaf=lambda node: isinstance(node, RULE_STATES)), new)


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, Stochastic)
