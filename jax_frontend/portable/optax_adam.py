r"""Optax's own Adam: which rule it follows, and its betas.

Its state has *biased* moments; `core.portable_bias` says how they become debiased ones. For that its betas have to be known,
which neither the state nor the transform tells: they are arguments, and compared here with what the transform does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.errors import InvalidArgument
from ...core.hyperparameters import RANGES, check_number
from ...core.rules import ADAM, ADAMW, Rule
from ..dependencies import flow
from ..direct import as_transformation
from .roles import Kind, Part, roles_of


def check_betas(tx: optax.GradientTransformation, parts: Sequence[Part], betas: Any) -> tuple[float, float]:
    """The betas of the Adam of Optax in a transform, as its user gave them.

    One update of tensors of one element, parameter and gradient zero, must make beta1*m and beta2*v of the moments m and v, up
    to two units of the dtype in which they are kept. Where a wrapper lets the first update pass unused, nothing is compared.

    Args:
        tx: the transform.
        parts: that have such a state.
        betas: (b1, b2).

    Raises:
        InvalidArgument: they were not given, are no betas, or are not those of the transform.
    """
    if betas is None:
        raise InvalidArgument(
            "betas=None is not possible for the moments of optax.adam or optax.adamw, which are debiased at each use: give "
            "betas=(b1, b2) as the transform has them. Its defaults are (0.9, 0.999)."
        )
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgument(f"betas={betas!r} must be two numbers (b1, b2).")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_number(f"{name} of betas", beta, RANGES[name])
    expected = {Kind.EXP_AVG: float(betas[0]), Kind.EXP_AVG_SQ: float(betas[1])}
    transform = as_transformation(tx)
    for part in parts:
        params = jax.tree.map(lambda kind: jnp.zeros([1] * len(kind.shape), kind.dtype), part.kinds)
        state = transform.init(params)
        roles = roles_of(part, state)
        before = jax.tree.map(
            lambda role, leaf: jnp.full_like(leaf, _start(role.kind, leaf)) if role.biased and role.kind in expected else leaf,
            roles,
            state,
        )
        _, after = transform.update(jax.tree.map(jnp.zeros_like, params), before, params)
        pairs = list(zip(jax.tree.leaves(roles), jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        updated = {role.names for role, old, new in pairs if role.kind is Kind.COUNT and not np.array_equal(old, new)}
        counted = {name for names in updated for name in names}
        for role, old, new in pairs:
            if not role.biased or role.kind not in expected or role.names[0] not in counted:
                continue
            beta, unit = expected[role.kind], float(jnp.finfo(new.dtype).eps)
            ratio = float(np.asarray(new, np.float64).item()) / float(np.asarray(old, np.float64).item())
            if not abs(ratio - beta) <= 2.0 * unit:
                raise InvalidArgument(
                    f"betas={tuple(betas)} are not those of this transform, which decays {role.kind.value} of "
                    f"{role.names[0]!r} by {ratio:.6g}, and not by {beta:g}; give what optax.adam or optax.adamw was called "
                    "with. Transforms with other moments (adamax) have no portable state."
                )
    return float(betas[0]), float(betas[1])


def _start(kind: Kind, leaf: Any) -> float:
    """A moment to decay. The second is so small that adamax, whose state looks the same, would keep its eps instead."""
    return 1.0 if kind is Kind.EXP_AVG else 4.0 * float(jnp.finfo(leaf.dtype).smallest_normal)


def rule_of(tx: optax.GradientTransformation, parts: Sequence[Part]) -> Rule:
    """Whether the Adam of Optax in a transform is "adamw": whether parameters enter the update, but not the moments.

    Nadam and RAdam keep the moments that Adam keeps, and cannot be told from it: what they make of them is not in a file.

    Args:
        tx: the transform.
        parts: that have such a state.
    """
    transform = as_transformation(tx)
    decays = False
    for part in parts:
        state = jax.eval_shape(transform.init, part.kinds)

        def traced(grads: Any, state: Any, params: Any) -> Any:
            return transform.update(grads, state, params)

        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(part.kinds, state, part.kinds)
        count = len(jax.tree.leaves(part.kinds))
        marks = flow(
            closed.jaxpr, [int(index >= len(closed.jaxpr.invars) - count) for index in range(len(closed.jaxpr.invars))]
        )
        updates = len(jax.tree.leaves(shapes[0]))
        roles = jax.tree.leaves(roles_of(part, shapes[1]))
        moments = [mark for role, mark in zip(roles, marks[updates:], strict=True) if role.biased and role.kind is Kind.EXP_AVG]
        if any(moments):
            return ADAM  # the decay is in the gradient
        decays = decays or any(marks[:updates])
    return ADAMW if decays else ADAM
