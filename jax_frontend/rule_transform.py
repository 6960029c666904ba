"""The Optax transform of a rule of the specification: the update of a whole tree of parameters."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import compensation as compensations
from ..core import random_bits
from ..core import update as specification
from ..core.array_ops import Array
from ..core.compensation import Stored
from ..core.dtypes import check_parameter_dtype, compute_dtype
from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from ..core.hyperparameters import Hyperparameters, is_zero
from ..core.rules import Rule
from .arguments import Arguments, decayed
from .array_ops import jax_ops
from .compensation import initial_leaf, params_needed, step
from .one_by_one import Turn, is_updated_one_by_one, mean_of_pieces, one_by_one
from .random_bits import bits_like, initial_key
from .records import Record, Source, recorder
from .state import RULE_STATES, AnyRuleState, PyTree, RuleState, RuleStateWithBetas, initial_compensation


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Hyperparameters and bias corrections of one update, in one compute dtype."""

    decaying: Hyperparameters  # of parameters with weight decay
    plain: Hyperparameters  # of those without
    corrections: Any  # of the rule

    @classmethod
    def of(cls, rule: Rule, hyperparameters: Hyperparameters, updates: Array, dtype: str) -> _Numbers:
        """Convert the hyperparameters so that none upcasts the arithmetic: arrays are cast, others become Python floats.

        Args:
            rule, hyperparameters: of this update.
            updates: 0-d int32, the number of this update, from 1 on.
            dtype: the compute dtype.
        """
        cast: dict[str, Any] = {}
        for name in hyperparameters.RANGES:
            value = getattr(hyperparameters, name)
            if value is not None:
                cast[name] = float(value) if isinstance(value, numbers.Real) else jax_ops.cast(value, dtype)
        decaying = dataclasses.replace(hyperparameters, **cast)
        return cls(
            decaying,
            dataclasses.replace(decaying, weight_decay=0.0),
            rule.corrections(decaying, jax_ops.cast(updates, dtype), jnp),
        )


class Leaf(NamedTuple):
    """The arguments of `core.update` for one parameter, in its order, and what its random bits are made of."""

    hyperparameters: Hyperparameters
    corrections: Any  # of the rule
    compensation: str  # resolved
    parameter: Array
    gradient: Array
    state: specification.TensorState
    random: tuple[Array, Array] | None = None  # for stochastic rounding: the key, and `core.random_bits.when` of this update

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of `core.update`."""
        return self[:-1]

    @property
    def bits(self) -> Array | None:
        """The random bits of all elements, uint32; None without stochastic rounding."""
        return None if self.random is None else bits_like(*self.random, self.parameter)

    def kept(self, compensation: Array | None) -> Array | None:
        """Return what the new state keeps: the new compensation, or the key, which stays."""
        return compensation if self.random is None else self.random[0]


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
        kept = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jax_ops.dtype_name(leaf)
            check_parameter_dtype(dtype, f"params{jax.tree_util.keystr(path)}")
            for column, of_field in zip(columns, arguments.dtypes(dtype), strict=True):
                column.append(jax_ops.zeros_like(leaf, of_field))
            stochastic = compensations.resolve(arguments.compensation, dtype) == "stochastic"
            kept.append(initial_key(arguments.seed or 0, path) if stochastic else initial_leaf(arguments.compensation, leaf))
        state = RuleState(
            count=jnp.zeros([], jnp.int32),
            fields=named(rule, map(treedef.unflatten, columns)),
            compensation=initial_compensation(params, kept),
        )
        if not arguments.betas_may_change:
            return state
        betas = {name: jnp.array(beta, getattr(beta, "dtype", float)) for name, beta in arguments.betas.items()}  # copies
        return RuleStateWithBetas(*state, betas)

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
        return jax.tree.map(lambda x: specification.rebiased(jax_ops, x, state.count, before, after), tree)

    fields = {field.name: of(state.fields[field.name], field.beta) for field in arguments.rule.fields}
    return state._replace(fields=fields, betas=now)


def leaves_of(
    arguments: Arguments, updates: PyTree, state: AnyRuleState, params: PyTree | None
) -> tuple[jax.Array, Any, list[Leaf | None]]:
    """Return the number of this update, the structure of updates, and every leaf; None where there is no gradient.

    Args:
        updates: the gradients, or a tree of None with the structure of params.
        state: as it is before the update; its count is that of earlier updates.
        params: None where neither weight decay nor compensation needs them.
    """
    count: Any = optax.safe_increment(state.count)
    hyperparameters = arguments.hyperparameters(state.count)
    treedef: Any
    grads, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
    parameters = [None] * len(grads) if params is None else _flatten_like(treedef, params, "the parameters")
    if params is None or arguments.mask is None or not arguments.decays:
        decays_of = [True] * len(grads)
    else:
        decays_of = treedef.flatten_up_to(decayed(arguments.mask, params))
    trees = (state.fields[field.name] for field in arguments.rule.fields)
    states = [_flatten_like(treedef, tree, "the optimizer state") for tree in (*trees, state.compensation)]
    by_dtype: dict[str, _Numbers] = {}
    when: Array | None = None
    leaves: list[Leaf | None] = []
    for (path, gradient), parameter, decays, *fields, kept in zip(grads, parameters, decays_of, *states, strict=True):
        if gradient is None:
            leaves.append(None)
            continue
        _check_gradient(gradient, fields, path)
        compensation, random = "none", None
        if parameter is None:
            parameter = jnp.zeros_like(gradient)  # without decay only its dtype matters
        else:
            compensation = compensations.resolve(arguments.compensation, jax_ops.dtype_name(parameter))
            _check_compensation(compensation, kept, parameter, path)
            if compensation == "stochastic":
                when = random_bits.when(jax_ops.cast(count, "uint32")) if when is None else when
                random, kept = (kept, when), None
        dtype = compute_dtype(jax_ops.dtype_name(parameter))
        if dtype not in by_dtype:
            by_dtype[dtype] = _Numbers.of(arguments.rule, hyperparameters, count, dtype)
        numbers_ = by_dtype[dtype]
        chosen = numbers_.decaying if decays else numbers_.plain
        state_of_leaf = specification.TensorState(tuple(fields), kept)
        leaves.append(Leaf(chosen, numbers_.corrections, compensation, parameter, gradient, state_of_leaf, random))
    return count, treedef, leaves


def _flatten_like(gradients: Any, tree: PyTree, name: str) -> list[Any]:
    """Return the leaves of a tree in the order of the gradients, of which only the structure is given."""
    try:
        return list(gradients.flatten_up_to(tree))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the gradients have the structure {gradients}, and {name} {jax.tree.structure(tree)}; they must be equal."
        ) from error


def _check_without_params(arguments: Arguments, state: AnyRuleState) -> None:
    why = None
    if arguments.decays:
        why = "for weight_decay"
    elif jax.tree.leaves(state.compensation):
        why = f"for compensation={arguments.compensation!r}"
    if why is not None:
        raise InvalidArgumentError(params_needed(arguments.rule.name, why))


def _check_gradient(gradient: Array, fields: list[Array], path: Any) -> None:
    name = f"the gradient of params{jax.tree_util.keystr(path)}"
    dtype = jax_ops.dtype_name(gradient)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedTensorError(f"{name} has dtype {dtype}; it must be a floating-point array.")
    if fields and jnp.shape(gradient) != jnp.shape(fields[0]):
        raise InvalidArgumentError(
            f"{name} has shape {jnp.shape(gradient)}, but its state has {jnp.shape(fields[0])}; they must be equal."
        )


def _check_compensation(compensation: str, kept: Array | None, parameter: Array, path: Any) -> None:
    dtype = jax_ops.dtype_name(parameter)
    needed = "uint32" if compensation == "stochastic" else compensations.compensation_dtype(compensation, dtype)
    found = None if kept is None else jax_ops.dtype_name(kept)
    if needed != found:
        raise InvalidArgumentError(
            f"params{jax.tree_util.keystr(path)} has dtype {dtype}, whose compensation is {needed}, and the state has {found}: "
            "the parameters were cast after init. Cast them first, and make the state with tx.init(params) then."
        )


def _update_leaf(rule: Rule, leaf: Leaf, scales_only: bool, *, direct: bool, turn: Turn) -> tuple[Any, ...]:
    """Return (increment, new parameter, *fields of its new state); no new parameter where scales_only."""
    hyperparameters, corrections, compensation, parameter, gradient, state, _ = leaf
    mean_square = None

    def new(g: Array, kept: Any, p: Array, *fields: Array) -> tuple[Any, ...]:
        value = compensations.load(jax_ops, compensation, Stored(p, kept))
        old = specification.TensorState(fields, kept)
        added, state = specification.increment(
            jax_ops, rule, hyperparameters, corrections, value, g, old, mean_square=mean_square
        )
        if scales_only:
            return jax_ops.cast(-added, jax_ops.dtype_name(p)), None, *state.fields, None
        stepped = step(compensation, p, value, added, direct=direct, bits=leaf.bits)
        return stepped.increment, stepped.parameter, *state.fields, stepped.compensation

    old = state.compensation, parameter, *state.fields
    if not is_updated_one_by_one(parameter):
        *others, kept = new(gradient, *old)
        return *others, leaf.kept(kept)

    def squares(g: Array, kept: Any, p: Array, *fields: Array) -> Any:
        piece = leaf._replace(parameter=p, gradient=g, state=specification.TensorState(fields, kept))
        return specification.accumulate(jax_ops, rule, *piece.arguments, first=True).mean_square

    if rule.clips_update:
        mean_square = mean_of_pieces(squares, (gradient, *old))

    def ordered(*arrays: Any) -> tuple[Any, ...]:
        increment, parameter, *fields, kept = new(*arrays)
        return kept, increment if parameter is None or not direct else parameter, *fields

    kept, first, *fields = one_by_one(ordered, gradient, old, turn)
    kept = leaf.kept(kept)
    if scales_only or not direct:
        return first, None, *fields, kept
    return new(gradient, *old)[0], first, *fields, kept  # the increment; XLA leaves out what is not needed
