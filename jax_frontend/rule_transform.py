"""The Optax transform of a rule of the specification: the update of a whole tree of parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import codings
from ..core import compensation as compensations
from ..core import update as specification
from ..core.array_ops import Array
from ..core.codings import Coded, EightBit
from ..core.compensation import Stored
from ..core.dtypes import check_parameter_dtype
from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import is_zero
from ..core.rules import Rule
from .arguments import Arguments
from .array_ops import jax_ops
from .compensation import initial_leaf, params_needed, step
from .leaves import Leaf, leaves_of
from .one_by_one import Turn, by_rows, is_updated_by_rows, is_updated_one_by_one, mean_of_pieces, one_by_one
from .random_bits import initial_key
from .records import Record, Source, recorder
from .state import (
    RULE_STATES,
    AnyRuleState,
    PyTree,
    RuleState,
    RuleStateWithBetas,
    compensations_in,
    initial_tree,
)

_MATRICES_ONLY = (
    "give it to adamw with optax.partition and param_labels_for_muon; stacked layers are updated one by one where they are "
    'params["layers"] of init_train_state, or under jax.vmap'
)


class RuleTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transform with the rule and the arguments that it was made of."""

    arguments: Arguments

    @property
    def rule(self) -> Rule:
        """What it computes."""
        return self.arguments.rule


def transformation(arguments: Arguments) -> RuleTransformation:
    """Return the Optax transform of a rule with these arguments."""
    rule = arguments.rule

    def init(params: PyTree) -> AnyRuleState:
        treedef: Any = jax.tree.structure(params)
        columns: list[list[Any]] = [[] for _ in rule.fields]
        kept, keys = [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jax_ops.dtype_name(leaf)
            check_parameter_dtype(dtype, name := f"params{jax.tree_util.keystr(path)}")
            rule.check_shape(jnp.shape(leaf), name, _MATRICES_ONLY)
            dtypes = arguments.dtypes(dtype, jnp.shape(leaf))
            for column, field, of_field in zip(columns, rule.fields, dtypes, strict=True):
                column.append(codings.zeros(jax_ops, field, leaf, of_field))
            kept.append(initial_leaf(arguments.compensation, leaf))
            keys.append(initial_key(arguments.seed or 0, path) if arguments.rounds_by_chance(dtype, dtypes) else None)
        state = RuleState(
            count=jnp.zeros([], jnp.int32),
            fields=named(rule, map(treedef.unflatten, columns)),
            compensation=initial_tree(params, kept),
            random_keys=initial_tree(params, keys) if arguments.may_round_by_chance else None,
        )
        if not arguments.betas_may_change:
            return state
        betas = {name: jnp.array(beta, getattr(beta, "dtype", float)) for name, beta in arguments.betas.items()}  # copies
        return RuleStateWithBetas(**state._asdict(), betas=betas)

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, AnyRuleState]:
        if not isinstance(state, RULE_STATES) or state.fields.keys() != {field.name for field in rule.fields}:
            raise InvalidArgumentError(
                f"state is a {_described(state)}, and {rule.name} needs a RuleState of its own; make it with tx.init(params) "
                "of this transform (import_state takes over optax's), and call update(grads, state, params) in this order."
            )
        record = recorder(extra_args)
        if params is None:
            _check_without_params(arguments, state)
        state = under_betas(arguments, state)
        count, treedef, leaves = leaves_of(arguments, updates, state, params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates, is_leaf=lambda x: x is None)]
        given = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        trees = (*(state.fields[field.name] for field in rule.fields), state.compensation)
        kept = zip(*map(treedef.flatten_up_to, trees), strict=True)
        results: list[tuple[Any, ...]] = []
        start = Turn(count > 0)
        for path, parameter, leaf, old in zip(paths, given, leaves, kept, strict=True):
            if leaf is None:  # without a gradient the state stays as it is
                increment, new = None, parameter
                results.append((None, *old))
            else:
                turn = start if getattr(record, "in_turn", False) else dataclasses.replace(start)
                increment, new, *state_of_leaf = _update_leaf(
                    rule, leaf, arguments.scales_only, direct=record is not None, turn=turn
                )
                results.append((increment, *state_of_leaf))
            if record is not None:
                decays = leaf is not None and not is_zero(leaf.hyperparameters.weight_decay)
                source = Source(arguments, decays)
                record(Record(path, parameter, increment, new, old[-1] is not None, source))
        columns = zip(*results, strict=True) if results else ((),) * (len(rule.fields) + 2)
        updates, *fields, compensation = (treedef.unflatten(column) for column in columns)
        return updates, state._replace(count=count, fields=named(rule, fields), compensation=compensation)

    made = RuleTransformation(init, update)
    made.arguments = arguments
    return made


def named(rule: Rule, values: Iterable[Any]) -> dict[str, Any]:
    """Return values in the order of the rule's fields, by their names."""
    return {field.name: value for field, value in zip(rule.fields, values, strict=True)}


def _described(state: Any) -> str:
    fields = f" with {', '.join(state.fields)}" if isinstance(state, RULE_STATES) else ""
    return f"{type(state).__name__}{fields}"


def under_betas(arguments: Arguments, state: AnyRuleState) -> AnyRuleState:
    """Return the state with its moments debiased under the present b1 and b2, where it keeps those of its last update.

    Raises:
        InvalidArgumentError: b1 or b2 is an array, and the state, made for numbers, does not keep the last ones.
    """
    if isinstance(state, RuleState):
        if arguments.betas_may_change:
            raise InvalidArgumentError(
                "b1 or b2 is an array, which may change from update to update, and the state is a RuleState of constant ones; "
                "make it with tx.init(params) of a transform whose b1 or b2 is an array."
            )
        return state
    now = {name: jnp.asarray(beta, state.betas[name].dtype) for name, beta in arguments.betas.items()}

    def of(tree: PyTree, beta: str | None) -> PyTree:
        if beta is None:
            return tree
        before, after = state.betas[beta], now[beta]
        rebiased = functools.partial(specification.rebiased, jax_ops, step=state.count, before=before, after=after)
        return jax.tree.map(rebiased, tree, is_leaf=lambda node: isinstance(node, EightBit))

    fields = {field.name: of(state.fields[field.name], field.beta) for field in arguments.rule.fields}
    return state._replace(fields=fields, betas=now)


def _check_without_params(arguments: Arguments, state: AnyRuleState) -> None:
    why = None
    if arguments.decays:
        why = "for weight_decay"
    elif compensations_in(state.compensation):
        why = f"for compensation={arguments.compensation!r}"
    if why is not None:
        raise InvalidArgumentError(params_needed(arguments.rule.name, why))


def _update_leaf(rule: Rule, leaf: Leaf, scales_only: bool, *, direct: bool, turn: Turn) -> tuple[Any, ...]:
    """Return (increment, new parameter, *fields of its new state, compensation); no new parameter where scales_only."""
    state, mean_square = leaf.state, None

    def new(part: Leaf) -> tuple[Any, ...]:
        p, kept = part.parameter, part.state.compensation
        value = compensations.load(jax_ops, part.compensation, Stored(p, kept))
        added, state = specification.increment(
            jax_ops,
            rule,
            part.hyperparameters,
            part.corrections,
            value,
            part.gradient,
            part.state,
            mean_square=mean_square,
            bits=part.bits,
        )
        if scales_only:
            return jax_ops.cast(-added, jax_ops.dtype_name(p)), None, *state.fields, None
        stepped = step(part.compensation, p, value, added, direct=direct, bits=part.bits(0))
        return stepped.increment, stepped.parameter, *state.fields, stepped.compensation

    whole = rule.of_matrix is not None
    rows = not whole and is_updated_by_rows(leaf.parameter, state.fields)
    if not rows and (whole or not is_updated_one_by_one(leaf.parameter)):
        *others, kept = new(leaf)
        return *others, leaf.kept(kept)
    old = state.compensation, leaf.parameter, *state.fields

    if rule.clips_update:
        mean_square = mean_square_of(rule, leaf, axis=0 if rows else None)

    def ordered(row: Any, g: Array, kept: Any, p: Array, *fields: Coded) -> tuple[Any, ...]:
        increment, parameter, *stored, kept = new(leaf.part(row, g, kept, p, fields))
        return kept, increment if parameter is None or not direct else parameter, *stored

    if rows:
        kept, first, *fields = by_rows(ordered, [leaf.gradient], old, turn)
    else:
        kept, first, *fields = one_by_one(functools.partial(ordered, 0), leaf.gradient, old, turn)
    kept = leaf.kept(kept)
    if scales_only or not direct:
        return first, None, *fields, kept
    return new(leaf)[0], first, *fields, kept  # the increment; XLA leaves out what is not needed


def mean_square_of(rule: Rule, leaf: Leaf, *, axis: int | None, first: bool = True) -> Array:
    """Return the mean square of a gradient, from pieces along an axis (None: the longest), as `Rule.mean_square` gives it."""

    def of(g: Array, kept: Any, p: Array, *fields: Coded) -> Any:
        part = leaf.part(0, g, kept, p, fields)  # bits do not matter
        return specification.accumulate(jax_ops, rule, *part.arguments, first=first, bits=part.bits).mean_square

    arrays = leaf.gradient, leaf.state.compensation, leaf.parameter, *leaf.state.fields
    return mean_of_pieces(of, arrays, axis)
