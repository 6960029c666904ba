"""The leaves of an update: of each parameter the arguments of the specification, checked, with numbers in its compute dtype."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import compensation as compensations
from ..core import random_bits
from ..core import update as specification
from ..core.array_ops import Array
from ..core.dtypes import compute_dtype
from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from ..core.hyperparameters import Hyperparameters
from ..core.rules import Rule
from .arguments import Arguments, decayed
from .array_ops import jax_ops
from .random_bits import bits_like
from .state import AnyRuleState, PyTree


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

    def bits(self, number: int) -> Array | None:
        """Return the random bits of all elements, uint32, of the parameter (0); None without stochastic rounding."""
        return None if self.random is None or number else bits_like(*self.random, self.parameter)

    def kept(self, compensation: Array | None) -> Array | None:
        """Return what the new state keeps: the new compensation, or the key, which stays."""
        return compensation if self.random is None else self.random[0]


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
