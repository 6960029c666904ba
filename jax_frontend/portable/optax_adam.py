r"""Optax's own Adam: the rule and the betas that its user declares, compared with what the transform does.

Its state has *biased* moments; `core.portable.bias` says how they become debiased ones. That needs the betas, which neither the
state nor the transform tells. And the type of the state does not tell the rule: adam and adamw share it with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.errors import InvalidArgumentError
from ...core.hyperparameters import DECAY, check_number
from ...core.rules import ADAM, ADAMW, RULES, Rule
from ..direct import as_transformation
from .roles import Kind, Part, Role, roles_of

_MOST_MICRO_STEPS = 4096
"""Of optax.MultiSteps, after which no update is waited for any more."""


class Declared(NamedTuple):
    """The rule and betas that the user declares for Optax's Adam."""

    rule: Rule
    betas: tuple[float, float]


def declared(rule: Any, betas: Any) -> Declared:
    """Return the declaration of the arguments `rule` and `betas`.

    Raises:
        InvalidArgumentError: one of them is missing, or not possible.
    """
    names = [each.name for each in (ADAM, ADAMW)]
    if rule not in names:
        raise InvalidArgumentError(
            f"rule={rule!r} is not possible for the moments of optax.adam or optax.adamw, whose state does not tell its rule; "
            f"give rule={' or '.join(map(repr, names))}, and betas=(b1, b2) as the transform has them."
        )
    if betas is None:
        raise InvalidArgumentError(
            "betas=None is not possible for the moments of optax.adam or optax.adamw, which are debiased at each use: give "
            "betas=(b1, b2) as the transform has them. Its defaults are (0.9, 0.999)."
        )
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} must be two numbers (b1, b2).")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_number(f"{name} of betas", beta, DECAY)
    return Declared(RULES[rule], (float(betas[0]), float(betas[1])))


def check_decays(tx: optax.GradientTransformation, parts: Sequence[Part], betas: tuple[float, float]) -> None:
    r"""Raise `InvalidArgumentError` unless the Adam of Optax in a transform decays its moments by these betas.

    One update of parameters of one element, with the gradient 0, must give

        m -> beta1*m    v -> beta2*v

    up to two units of the dtype in which the moments are kept. Where no update comes through a wrapper, nothing is compared.

    Args:
        tx: the transform.
        parts: that have such a state.
        betas: (b1, b2).
    """
    transform = as_transformation(tx)
    for part in parts:
        zeros = jax.tree.map(lambda kind: jnp.zeros([1] * len(kind.shape), kind.dtype), part.kinds)
        state = transform.init(zeros)
        roles: list[Role] = jax.tree.leaves(roles_of(part, state))
        before = jax.tree.unflatten(
            jax.tree.structure(state), [_filled(*pair) for pair in zip(roles, jax.tree.leaves(state), strict=True)]
        )
        update, after = jax.jit(transform.update), before
        for _ in range(_MOST_MICRO_STEPS):
            _, after = update(zeros, after, zeros)
            updated = _updated(roles, before, after)
            if updated:
                _compare(roles, before, after, updated, betas)
                break


def _filled(role: Role, leaf: Any) -> Any:
    if not role.biased or role.kind is not Kind.FIELD:
        return leaf
    # The second moment is so small that adamax would keep its eps instead.
    return jnp.full_like(leaf, 1.0 if role.field == ADAM.fields[0].name else 4.0 * float(jnp.finfo(leaf.dtype).smallest_normal))


def _updated(roles: Sequence[Role], before: Any, after: Any) -> set[str]:
    """Return the names of the parameters of which Optax's Adam has counted an update."""
    leaves = zip(roles, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return {
        name
        for role, old, new in leaves
        if role.kind is Kind.COUNT and role.biased and not np.array_equal(old, new)
        for name in role.names
    }


def _compare(roles: Sequence[Role], before: Any, after: Any, updated: set[str], betas: tuple[float, float]) -> None:
    for role, old, new in zip(roles, jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if not role.biased or role.kind is not Kind.FIELD or role.names[0] not in updated:
            continue
        beta = betas[[field.name for field in ADAM.fields].index(role.field)]
        ratio = float(np.asarray(new, np.float64).item() / np.asarray(old, np.float64).item())
        if not abs(ratio - beta) <= 2.0 * float(jnp.finfo(new.dtype).eps):
            raise InvalidArgumentError(
                f"betas={betas} are not those of this transform, which decays {role.field} of {role.names[0]!r} by "
                f"{ratio:.6g}, and not by {beta:g}; give what optax.adam or optax.adamw was called with. Transforms with other "
                "moments (adamax, yogi, adopt) have no portable state."
            )
