"""A transform around Optax's Adam, tried on small numbers: what it does tells what its state does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..direct import as_transformation
from ..state import PyTree
from .roles import Kind, Part, Role, roles_of

_MOST_MICRO_STEPS = 4096


class Tried(NamedTuple):
    """One parameter after an update. Numbers."""

    exp_avg: float
    exp_avg_sq: float
    increment: float


class Probe:
    """The transform with a parameter of one element, zero, for each of a part's.

    Args:
        tx: the transform.
        part: that has a state of Optax's Adam.
    """

    def __init__(self, tx: optax.GradientTransformation, part: Part) -> None:
        transform = as_transformation(tx)
        self._part, self._update = part, jax.jit(transform.update)
        self._params = jax.tree.map(lambda kind: jnp.zeros([1] * len(kind.shape), kind.dtype), part.kinds)
        self._state = transform.init(self._params)
        self._roles: list[Role] = jax.tree.leaves(roles_of(part, self._state))
        names: set[str] = set()
        for _ in range(_MOST_MICRO_STEPS):  # of optax.MultiSteps
            before, (_, self._after) = self._state, self._update(self._params, self._state, self._params)
            names = self._updated(before)
            if names:
                break
            self._state = self._after
        self.dtypes: dict[tuple[str, Kind], Any] = {
            (role.names[0], role.kind): leaf.dtype
            for role, leaf in zip(self._roles, jax.tree.leaves(self._state), strict=True)
            if role.biased and role.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        }
        """Of the moments that Optax's Adam keeps."""
        self.names = [name for name in dict.fromkeys(name for name, _ in self.dtypes) if name in names]
        """Of the parameters that it updates: of none, where a wrapper lets no update through."""

    def _updated(self, before: PyTree) -> set[str]:
        """The parameters for whose updates Optax's Adam has counted one."""
        leaves = zip(self._roles, jax.tree.leaves(before), jax.tree.leaves(self._after), strict=True)
        return {
            name
            for role, old, new in leaves
            if role.kind is Kind.COUNT and role.biased and not np.array_equal(old, new)
            for name in role.names
        }

    def __call__(
        self, exp_avg: Mapping[str, float], exp_avg_sq: Mapping[str, float], gradient: float = 0.0, scheduled: int = 0
    ) -> dict[str, Tried]:
        """Adam's first update of each parameter, whatever its moments are.

        Args:
            exp_avg, exp_avg_sq: the moments before, by name.
            gradient: of each parameter.
            scheduled: what schedules have counted.
        """
        given = {Kind.EXP_AVG: exp_avg, Kind.EXP_AVG_SQ: exp_avg_sq}

        def filled(role: Role, leaf: Any) -> Any:
            if role.kind in given and role.biased:
                return jnp.full_like(leaf, given[role.kind].get(role.names[0], 0.0))
            return jnp.full_like(leaf, scheduled) if role.kind is Kind.COUNT and not role.biased else leaf

        leaves = [filled(*pair) for pair in zip(self._roles, jax.tree.leaves(self._state), strict=True)]
        grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, gradient), self._params)
        updates, state = self._update(grads, jax.tree.unflatten(jax.tree.structure(self._state), leaves), self._params)
        found: dict[tuple[str, Any], float] = {
            (self._part.name(path), "increment"): _number(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        }
        for role, leaf in zip(self._roles, jax.tree.leaves(state), strict=True):
            if role.kind in given and role.biased:
                found[role.names[0], role.kind] = _number(leaf)
        return {name: Tried(*(found[name, what] for what in (*given, "increment"))) for name in self.names}


def _number(leaf: Any) -> float:
    return float(np.asarray(leaf, np.float64).item())
