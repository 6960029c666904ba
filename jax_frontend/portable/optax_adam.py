r"""Optax's own Adam: whether it is one, which rule it follows, and its betas.

Its state has *biased* moments; `core.portable.bias` says how they become debiased ones. For that its betas have to be known,
which neither the state nor the transform tells: they are arguments. And other transforms have a state of the same type
(adamax, nadam, radam, yogi, adopt). So a transform is tried on numbers, and must do what Adam does with these betas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...core.errors import InvalidArgumentError, RefusedError
from ...core.hyperparameters import RANGES, check_number
from ...core.rules import ADAM, ADAMW, Rule
from ..dependencies import flow
from ..direct import as_transformation
from .probe import Probe
from .roles import Kind, Part, roles_of

_SCHEDULED = tuple(10**power for power in range(8))
"""Numbers of updates at which a schedule may be something else than zero."""

_GRADIENT = 4.0

_DECLARE = (
    "a file has no rule for it. If the moments are to go on as Adam's, say so: give optax.adam or optax.adamw, with the same "
    "betas, as tx here; its state has the same structure"
)


def check_adam(tx: optax.GradientTransformation, parts: Sequence[Part], betas: Any) -> tuple[float, float]:
    r"""The betas of the Adam of Optax in a transform, as its user gave them, if it is Adam and has these betas.

    One update of tensors of one element, parameter zero, must obey

        g = 0:  m -> beta1*m    v -> beta2*v            m = v = 0:  v = (1-beta2) * (m/(1-beta1))^2

    and its increment must follow from the new m and v alone (Nadam's also from g), and from v at the first update, too
    (RAdam's does not). The first line is compared up to two units of the dtype in which the moments are kept, all others up to
    a factor. Where no update comes through a wrapper, nothing is compared, and of increments nothing where all are zero.

    Args:
        tx: the transform.
        parts: that have such a state.
        betas: (b1, b2).

    Raises:
        InvalidArgumentError: they were not given, are no betas, or are not those of the transform.
        RefusedError: the transform is no Adam.
    """
    if betas is None:
        raise InvalidArgumentError(
            "betas=None is not possible for the moments of optax.adam or optax.adamw, which are debiased at each use: give "
            "betas=(b1, b2) as the transform has them. Its defaults are (0.9, 0.999)."
        )
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} must be two numbers (b1, b2).")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_number(f"{name} of betas", beta, RANGES[name])
    found = float(betas[0]), float(betas[1])
    for part in parts:
        probe = Probe(tx, part)
        if probe.names:
            _check_decays(probe, found)
            _check_means(probe, found)
            _check_increments(probe, found)
    return found


def _check_decays(probe: Probe, betas: tuple[float, float]) -> None:
    # The second moment is so small that adamax would keep its eps instead.
    smallest = {name: 4.0 * float(jnp.finfo(probe.dtypes[name, Kind.EXP_AVG_SQ]).smallest_normal) for name in probe.names}
    before = {Kind.EXP_AVG: dict.fromkeys(probe.names, 1.0), Kind.EXP_AVG_SQ: smallest}
    for name, after in probe(before[Kind.EXP_AVG], smallest).items():
        for kind, beta, new in zip(before, betas, after[:2], strict=True):
            ratio = new / before[kind][name]
            if not abs(ratio - beta) <= 2.0 * float(jnp.finfo(probe.dtypes[name, kind]).eps):
                raise InvalidArgumentError(
                    f"betas={betas} are not those of this transform, which decays {kind.value} of {name!r} by {ratio:.6g}, and "
                    f"not by {beta:g}; give what optax.adam or optax.adamw was called with. Transforms with other moments "
                    "(adamax) have no portable state."
                )


def _check_means(probe: Probe, betas: tuple[float, float]) -> None:
    nothing = dict.fromkeys(probe.names, 0.0)
    for name, (mean, square, _) in probe(nothing, nothing, gradient=_GRADIENT).items():
        # A beta that was rounded (optax.inject_hyperparams) says little of what it lacks of 1.
        units = [float(jnp.finfo(probe.dtypes[name, kind]).eps) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)]
        rounded = any(unit > (1 - beta) / 8 for unit, beta in zip(units, betas, strict=True))
        if not rounded and not _alike(square, (1 - betas[1]) * (mean / (1 - betas[0])) ** 2, 2.0):
            raise RefusedError(
                f"exp_avg and exp_avg_sq of {name!r} are not the means of one gradient and of its square, although the state "
                "of the transform looks like Adam's; only Adam's moments have a portable state."
            )


def _check_increments(probe: Probe, betas: tuple[float, float]) -> None:
    """Raise `RefusedError` for what has Adam's moments and makes something else of them."""
    small, one, sixteen = (dict.fromkeys(probe.names, value) for value in (2.0**-6, 1.0, 16.0))
    for scheduled in _SCHEDULED:
        plain = probe(small, one, scheduled=scheduled)
        if any(tried.increment for tried in plain.values()):
            break
    else:
        return
    lower = probe(small, sixteen, scheduled=scheduled)
    twice = probe({name: 2 * value for name, value in small.items()}, one, scheduled=scheduled)
    for name in probe.names:
        # Where a later transform normalises the increment, nothing of it can be told.
        increments = [tried[name].increment for tried in (plain, lower, twice)]
        if _alike(increments[0], increments[1], 1.01) and not _alike(increments[0], increments[2], 1.01):
            raise RefusedError(
                f"the first update of {name!r} does not depend on exp_avg_sq, as Adam's does (RAdam's is so): {_DECLARE}."
            )
    if 0.0 in betas:
        return
    moved = probe(dict.fromkeys(probe.names, 0.0), one, gradient=_GRADIENT, scheduled=scheduled)
    same = [{name: tried[index] / betas[index] for name, tried in moved.items()} for index in (0, 1)]
    still = probe(same[0], same[1], scheduled=scheduled)
    for name in probe.names:
        if not _alike(moved[name].increment, still[name].increment, 2.0):
            raise RefusedError(
                f"the update of {name!r} depends on the gradient besides the moments, as Adam's does not (Nadam's does: "
                f"nesterov=True): {_DECLARE}."
            )


def _alike(one: float, other: float, factor: float) -> bool:
    """Whether two numbers differ by less than a factor; zeros are alike."""
    low, high = sorted((abs(one), abs(other)))
    return one * other >= 0 and high <= factor * low


def rule_of(tx: optax.GradientTransformation, parts: Sequence[Part]) -> Rule:
    """Whether the Adam of Optax in a transform is "adamw": whether parameters enter the update, but not the moments.

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
