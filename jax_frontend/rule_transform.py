"""The Optax transform of a rule of the specification: the update of a whole tree of parameters."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import compensation as compensations
from ..core import update as specification
from ..core.array_ops import Array
from ..core.compensation import Stored
from ..core.dtypes import check_parameter_dtype, compute_dtype
from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from ..core.hyperparameters import RANGES, Hyperparameters
from ..core.moments import Corrections, bias_corrections, is_zero
from ..core.rules import Rule
from .arguments import Arguments, decayed
from .array_ops import jax_ops
from .compensation import initial_leaf, params_needed, step
from .one_by_one import Turn, is_updated_one_by_one, mean_of_pieces, one_by_one
from .records import Record, Source, recorder
from .state import ADAM_STATES, AdamState, AdamStateWithBetas, AnyAdamState, PyTree, initial_compensation


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Hyperparameters and bias corrections of one update, in one compute dtype."""

    decaying: Hyperparameters  # of parameters with weight decay
    plain: Hyperparameters  # of those without
    corrections: Corrections

    @classmethod
    def of(cls, hyperparameters: Hyperparameters, updates: Array, dtype: str) -> _Numbers:
        """Convert the hyperparameters so that none upcasts the arithmetic: arrays are cast, others become Python floats.

        Args:
            hyperparameters: of this update.
            updates: 0-d int32, the number of this update, from 1 on.
            dtype: the compute dtype.
        """
        cast: dict[str, Any] = {}
        for name in RANGES:
            value = getattr(hyperparameters, name)
            if value is not None:
                cast[name] = float(value) if isinstance(value, numbers.Real) else jax_ops.cast(value, dtype)
        decaying = dataclasses.replace(hyperparameters, **cast)
        return cls(
            decaying,
            dataclasses.replace(decaying, weight_decay=0.0),
            bias_corrections(decaying, jax_ops.cast(updates, dtype), jnp),
        )


class Leaf(NamedTuple):
    """The arguments of `core.update` for one parameter, in its order."""

    hyperparameters: Hyperparameters
    corrections: Corrections
    compensation: str  # resolved
    parameter: Array
    gradient: Array
    state: specification.TensorState


class RuleTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transform with the rule and the arguments that it was made of."""

    rule: Rule
    arguments: Arguments


def transformation(rule: Rule, arguments: Arguments) -> RuleTransformation:
    """Return the Optax transform of a rule."""

    def init(params: PyTree) -> AnyAdamState:
        treedef: Any = jax.tree.structure(params)
        exp_avg, exp_avg_sq, kept = [], [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jax_ops.dtype_name(leaf)
            check_parameter_dtype(dtype, f"params{jax.tree_util.keystr(path)}")
            dtypes = arguments.dtypes(dtype)
            exp_avg.append(jax_ops.zeros_like(leaf, dtypes.exp_avg))
            exp_avg_sq.append(jax_ops.zeros_like(leaf, dtypes.exp_avg_sq))
            kept.append(initial_leaf(arguments.compensation, leaf))
        state = AdamState(
            count=jnp.zeros([], jnp.int32),
            exp_avg=treedef.unflatten(exp_avg),
            exp_avg_sq=treedef.unflatten(exp_avg_sq),
            compensation=initial_compensation(params, kept),
        )
        if not arguments.betas_may_change:
            return state
        betas = (jnp.array(beta, getattr(beta, "dtype", float)) for beta in (arguments.b1, arguments.b2))  # copies
        return AdamStateWithBetas(*state, *betas)

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, AnyAdamState]:
        if not isinstance(state, ADAM_STATES):
            raise InvalidArgumentError(
                f"state is a {type(state).__name__}, and {rule.name} needs an AdamState; make it with tx.init(params) of this "
                "transform (import_state takes over optax's), and call update(grads, state, params) in this order."
            )
        record = recorder(extra_args)
        if params is None:
            _check_without_params(rule, arguments, state)
        state = under_betas(arguments, state)
        count, treedef, leaves = leaves_of(rule, arguments, updates, state, params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(updates, is_leaf=lambda x: x is None)]
        given = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        kept = zip(*(treedef.flatten_up_to(field) for field in state[1:4]), strict=True)
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
                source = Source(rule, arguments, decays)
                record(Record(path, parameter, increment, new, old[-1] is not None, source))
        columns = zip(*results, strict=True) if results else ((), (), (), ())
        updates, *fields = (treedef.unflatten(column) for column in columns)
        return updates, state._replace(count=count, **dict(zip(AdamState._fields[1:], fields, strict=True)))

    made = RuleTransformation(init, update)
    made.rule, made.arguments = rule, arguments
    return made


def under_betas(arguments: Arguments, state: AnyAdamState) -> AnyAdamState:
    """Return the state with its moments debiased under the present b1 and b2, where it keeps those of its last update.

    Raises:
        InvalidArgumentError: b1 or b2 is an array, and the state, made for numbers, does not keep the last ones.
    """
    if isinstance(state, AdamState):
        if arguments.betas_may_change:
            raise InvalidArgumentError(
                "b1 or b2 is an array, which may change from update to update, and the state is an AdamState of constant ones; "
                "make it with tx.init(params) of a transform whose b1 or b2 is an array."
            )
        return state
    b1, b2 = (jnp.asarray(new, old.dtype) for old, new in ((state.b1, arguments.b1), (state.b2, arguments.b2)))

    def of(moments: PyTree, before: Array, after: Array) -> PyTree:
        return jax.tree.map(lambda x: specification.rebiased(jax_ops, x, state.count, before, after), moments)

    exp_avg, exp_avg_sq = of(state.exp_avg, state.b1, b1), of(state.exp_avg_sq, state.b2, b2)
    return state._replace(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, b1=b1, b2=b2)


def leaves_of(
    rule: Rule, arguments: Arguments, updates: PyTree, state: AnyAdamState, params: PyTree | None
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
    states = [_flatten_like(treedef, field, "the optimizer state") for field in state[1:4]]
    by_dtype: dict[str, _Numbers] = {}
    leaves: list[Leaf | None] = []
    for (path, gradient), parameter, decays, *kept in zip(grads, parameters, decays_of, *states, strict=True):
        if gradient is None:
            leaves.append(None)
            continue
        _check_gradient(gradient, kept[0], path)
        compensation = "none"
        if parameter is None:
            parameter = jnp.zeros_like(gradient)  # without decay only its dtype matters
        else:
            compensation = compensations.resolve(arguments.compensation, jax_ops.dtype_name(parameter))
            _check_compensation(compensation, kept[2], parameter, path)
        dtype = compute_dtype(jax_ops.dtype_name(parameter))
        if dtype not in by_dtype:
            by_dtype[dtype] = _Numbers.of(hyperparameters, count, dtype)
        numbers_ = by_dtype[dtype]
        chosen = numbers_.decaying if decays else numbers_.plain
        leaves.append(Leaf(chosen, numbers_.corrections, compensation, parameter, gradient, specification.TensorState(*kept)))
    return count, treedef, leaves


def _flatten_like(gradients: Any, tree: PyTree, name: str) -> list[Any]:
    """Return the leaves of a tree in the order of the gradients, of which only the structure is given."""
    try:
        return list(gradients.flatten_up_to(tree))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the gradients have the structure {gradients}, and {name} {jax.tree.structure(tree)}; they must be equal."
        ) from error


def _check_without_params(rule: Rule, arguments: Arguments, state: AnyAdamState) -> None:
    why = None
    if arguments.decays:
        why = "for weight_decay"
    elif jax.tree.leaves(state.compensation):
        why = f"for compensation={arguments.compensation!r}"
    if why is not None:
        raise InvalidArgumentError(params_needed(rule.name, why))


def _check_gradient(gradient: Array, exp_avg: Array, path: Any) -> None:
    name = f"the gradient of params{jax.tree_util.keystr(path)}"
    dtype = jax_ops.dtype_name(gradient)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedTensorError(f"{name} has dtype {dtype}; it must be a floating-point array.")
    if jnp.shape(gradient) != jnp.shape(exp_avg):
        raise InvalidArgumentError(
            f"{name} has shape {jnp.shape(gradient)}, but its state has {jnp.shape(exp_avg)}; they must be equal."
        )


def _check_compensation(compensation: str, kept: Array | None, parameter: Array, path: Any) -> None:
    dtype = jax_ops.dtype_name(parameter)
    needed, found = compensations.compensation_dtype(compensation, dtype), None if kept is None else jax_ops.dtype_name(kept)
    if needed != found:
        raise InvalidArgumentError(
            f"params{jax.tree_util.keystr(path)} has dtype {dtype}, whose compensation is {needed}, and the state has {found}: "
            "the parameters were cast after init. Cast them first, and make the state with tx.init(params) then."
        )


def _update_leaf(rule: Rule, leaf: Leaf, scales_only: bool, *, direct: bool, turn: Turn) -> tuple[Any, ...]:
    """Return (increment, new parameter, *fields of its new state); no new parameter where scales_only."""
    hyperparameters, corrections, compensation, parameter, gradient, state = leaf
    mean_square = None

    def new(g: Array, kept: Any, p: Array, m: Array, v: Array) -> tuple[Any, ...]:
        value = compensations.load(jax_ops, compensation, Stored(p, kept))
        old = specification.TensorState(m, v, kept)
        added, state = specification.increment(
            jax_ops, rule, hyperparameters, corrections, value, g, old, mean_square=mean_square
        )
        if scales_only:
            return jax_ops.cast(-added, jax_ops.dtype_name(p)), None, state.exp_avg, state.exp_avg_sq, None
        stepped = step(compensation, p, value, added, direct=direct)
        return stepped.increment, stepped.parameter, state.exp_avg, state.exp_avg_sq, stepped.compensation

    old = state.compensation, parameter, state.exp_avg, state.exp_avg_sq
    if not is_updated_one_by_one(parameter):
        return new(gradient, *old)

    def squares(g: Array, kept: Any, p: Array, m: Array, v: Array) -> Any:
        piece = leaf._replace(parameter=p, gradient=g, state=specification.TensorState(m, v, kept))
        return specification.accumulate(jax_ops, rule, *piece, first=True).mean_square

    if rule.clips_update:
        mean_square = mean_of_pieces(squares, (gradient, *old))

    def ordered(*arrays: Any) -> tuple[Any, ...]:
        increment, parameter, exp_avg, exp_avg_sq, kept = new(*arrays)
        return kept, increment if parameter is None or not direct else parameter, exp_avg, exp_avg_sq

    kept, first, *moments = one_by_one(ordered, gradient, old, turn)
    if scales_only or not direct:
        return first, None, *moments, kept
    return new(gradient, *old)[0], first, *moments, kept  # the increment; XLA leaves out what is not needed
