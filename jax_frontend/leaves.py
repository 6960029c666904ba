"""The leaves of an update: of each parameter the arguments of the specification, checked, with numbers in its compute dtype."""

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
from ..core.codings import EIGHT_BIT, Coded, EightBit, check_codes, random_fields
from ..core.dtypes import compute_dtype
from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from ..core.hyperparameters import Hyperparameters
from ..core.rules import Rule
from .arguments import Arguments, decayed
from .array_ops import jax_ops
from .random_bits import Randomness
from .state import AnyRuleState, PyTree, Stochastic


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
    random: Randomness | None = None  # None: nothing is rounded stochastically

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of `core.update`."""
        return self[:-1]

    def part(self, row: Any, gradient: Array, kept: Array | None, parameter: Array, fields: tuple[Coded, ...]) -> Leaf:
        """Return the leaf of some rows of the parameter, or of all: of those from `row` on."""
        state, random = specification.TensorState(fields, kept), self.random and self.random._replace(row=row)
        return self._replace(parameter=parameter, gradient=gradient, state=state, random=random)

    def bits(self, number: int) -> Array | None:
        """Return the `core.update.Bits` of the parameter (0) or of its nth field."""
        return None if self.random is None else self.random.bits(number, self.parameter)

    def kept(self, compensation: Array | None) -> Array | Stochastic | None:
        """Return what the new state keeps as compensation."""
        return Stochastic() if self.compensation == "stochastic" else compensation


def leaves_of(
    arguments: Arguments, updates: PyTree, state: AnyRuleState, params: PyTree | None, microbatch: Any = 0
) -> tuple[jax.Array, Any, list[Leaf | None]]:
    """Return the number of this update, the structure of updates, and every leaf; None where there is no gradient.

    Args:
        updates: the gradients, or a tree of None with the structure of params.
        state: as it is before the update; its count is that of earlier updates.
        params: None where neither weight decay nor compensation needs them.
        microbatch: its number within the update, an int or a 0-d array.
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
    keys = [None] * len(grads) if state.random_keys is None else _flatten_like(treedef, state.random_keys, "the random keys")
    field_decays = arguments.rule.decays(hyperparameters)
    by_dtype: dict[str, _Numbers] = {}
    leaves: list[Leaf | None] = []
    for (path, gradient), parameter, decays, *fields, kept, key in zip(
        grads, parameters, decays_of, *states, keys, strict=True
    ):
        if gradient is None:
            leaves.append(None)
            continue
        _check_gradient(gradient, fields, path)
        for field, coded in zip(arguments.rule.fields, fields, strict=True):
            if isinstance(coded, EightBit):
                codes, scale = map(jax_ops.dtype_name, coded)
                check_codes(field, codes, scale, f"params{jax.tree_util.keystr(path)}")
        compensation, random, stored = "none", None, tuple(map(stored_dtype, fields))
        if parameter is None:
            parameter = jnp.zeros_like(gradient)  # without decay only its dtype matters
        else:
            compensation = compensations.resolve(arguments.compensation, jax_ops.dtype_name(parameter))
            _check_compensation(compensation, kept, parameter, path)
            arguments.check_stored(stored, parameter, f"params{jax.tree_util.keystr(path)}")
        by_chance = random_fields(arguments.rule.fields, stored, field_decays)
        if compensation in compensations.WITH_RANDOM_BITS:
            by_chance = (0, *by_chance)
        if by_chance:
            _check_key(key, path)
            update, part = jax_ops.cast(count, "uint32"), jax_ops.cast(microbatch, "uint32")
            random = Randomness(key, update, part, by_chance, size=jnp.size(parameter))
        dtype = compute_dtype(jax_ops.dtype_name(parameter))
        if dtype not in by_dtype:
            by_dtype[dtype] = _Numbers.of(arguments.rule, hyperparameters, count, dtype)
        scalars = by_dtype[dtype]
        chosen = scalars.decaying if decays else scalars.plain
        state_of_leaf = specification.TensorState(tuple(fields), None if isinstance(kept, Stochastic) else kept)
        leaves.append(Leaf(chosen, scalars.corrections, compensation, parameter, gradient, state_of_leaf, random))
    return count, treedef, leaves


def _flatten_like(gradients: Any, tree: PyTree, name: str) -> list[Any]:
    """Return the leaves of a tree in the order of the gradients, of which only the structure is given."""
    try:
        return list(gradients.flatten_up_to(tree))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the gradients have the structure {gradients}, and {name} {jax.tree.structure(tree)}; they must be equal."
        ) from error


def stored_dtype(field: Coded) -> str:
    """Return the dtype of a stored field, as `core.codings.state_dtypes` names it."""
    return EIGHT_BIT if isinstance(field, EightBit) else jax_ops.dtype_name(field)


def _shape(field: Coded) -> tuple[int, ...]:
    return jnp.shape(field.codes if isinstance(field, EightBit) else field)


def _check_gradient(gradient: Array, fields: list[Coded], path: Any) -> None:
    name = f"the gradient of params{jax.tree_util.keystr(path)}"
    dtype = jax_ops.dtype_name(gradient)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedTensorError(f"{name} has dtype {dtype}; it must be a floating-point array.")
    if fields and jnp.shape(gradient) != _shape(fields[0]):
        raise InvalidArgumentError(
            f"{name} has shape {jnp.shape(gradient)}, but its state has {_shape(fields[0])}; they must be equal."
        )


def _check_key(key: Array | None, path: Any) -> None:
    if key is None:
        raise InvalidArgumentError(
            f"params{jax.tree_util.keystr(path)} is rounded stochastically, it or its state, and the state has no random key "
            "for it; make the state with tx.init(params) of this transform."
        )


def _check_compensation(compensation: str, kept: Array | Stochastic | None, parameter: Array, path: Any) -> None:
    dtype = jax_ops.dtype_name(parameter)
    needed = "stochastic" if compensation == "stochastic" else compensations.compensation_dtype(compensation, dtype)
    found = "stochastic" if isinstance(kept, Stochastic) else None if kept is None else jax_ops.dtype_name(kept)
    if needed != found:
        raise InvalidArgumentError(
            f"params{jax.tree_util.keystr(path)} has dtype {dtype}, whose compensation is {needed}, and the state has {found}: "
            "the parameters were cast after init, or the state is of another precision= or compensation=. Cast them first, and "
            "make the state with tx.init(params) of this transform then."
        )
