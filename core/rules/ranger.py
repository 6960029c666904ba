"""Ranger: RAdam (Liu et al., 2020) with Lookahead (Zhang et al., 2019)."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array
from ..hyperparameters import Constant, Range, Scalar
from . import adam_family, radam
from .adam_family import Moments
from .radam import RAdamHyperparameters
from .rule import Entered, Field, Fields, Rule

COUNT = Constant("an int, 1 or more", lambda value: type(value) is int and value >= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RangerHyperparameters(RAdamHyperparameters):
    """Those of Ranger.

    Args:
        k: number of updates from one synchronisation with the slow weights to the next.
        alpha: the share of the way to the parameter that the slow weights go at each, in (0, 1).
    """

    k: Annotated[int, COUNT, "updates from one synchronisation with the slow weights to the next, an int"]
    alpha: Annotated[Scalar, Range(0.0, 1.0, low_included=False), "the share of the way to the parameter that they then go"]


class Corrections(NamedTuple):
    """What the moments, the step and the way from the slow weights of one update are multiplied by.

    first, second, plain, rectified: as RAdam's. kept: 0 at a synchronisation, else 1. returned: then 1-alpha, else 0.
    """

    first: Scalar
    second: Scalar
    plain: Scalar
    rectified: Scalar
    kept: Scalar
    returned: Scalar


def corrections(current: RangerHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """The factors of update number `step`: every k-th synchronises."""
    first, second, plain, rectified, _ = radam.corrections(current, step, xp)
    back = 1.0 - current.alpha
    if isinstance(step, numbers.Real):
        kept, returned = (0.0, back) if step % current.k == 0 else (1.0, 0.0)
        return Corrections(first, second, plain, rectified, kept, returned)
    one, meets = xp.ones_like(step), step % current.k == 0
    return Corrections(first, second, plain, rectified, xp.where(meets, 0 * one, one), xp.where(meets, back * one, 0 * one))


def accumulate(
    current: RangerHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Fields:
    """Put a micro-batch into the moments, as Adam does."""
    of_adam = adam_family.Corrections(*corrections[:2])
    return *adam_family.accumulate(current, of_adam, Moments(*fields[:2]), gradient, xp, first=first), fields[2]


def direction(
    current: RangerHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return m, or r*m/(sqrt(v) + eps) once the second moment has seen enough gradients."""
    _, _, plain, rectified, _, _ = corrections
    exp_avg, exp_avg_sq, _ = fields
    return exp_avg * (plain + rectified / (xp.sqrt(exp_avg_sq) + current.eps))


def looked_ahead(corrections: Corrections, fields: Fields, added: Array) -> tuple[Fields, Array]:
    """Add a step to the way from the slow weights; at a synchronisation go (1-alpha) of it back, and begin a new one."""
    _, _, _, _, kept, returned = corrections
    way = fields[2] + added
    return (*fields[:2], kept * way), added - returned * way


def chosen(own: Mapping[str, Any]) -> Rule:
    """Return the row of these settings."""
    return RANGER if own["decoupled_weight_decay"] else RANGER_L2


RANGER = Rule(
    name="ranger",
    title="Ranger: RAdam whose parameters go back, every k updates, towards slow weights",
    mathematics="""
        m += c1*(g-m)    v += c2*(g*g-v)        c = (1-beta)/(1-beta^t)
        p <- p - lr*(u + weight_decay*p)        u = m where rho <= 5, else r*m/(sqrt(v)+eps), rho and r as RAdam's
        where k divides t:    s <- s + alpha*(p-s)    p <- s        s begins as p; the state has p-s, in p's dtype at least
    """,
    source="Zhang et al., 2019, https://arxiv.org/abs/1907.08610; Liu et al., 2020, https://arxiv.org/abs/1908.03265.",
    fields=(*adam_family.FIELDS, Field("lookahead", is_precise=True)),
    hyperparameters=RangerHyperparameters,
    defaults={
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-6,
        "k": 6,
        "alpha": 0.5,
        "decoupled_weight_decay": True,
    },
    corrections=corrections,
    accumulate=accumulate,
    direction=direction,
    after_step=looked_ahead,
    variant=chosen,
)
RANGER_L2 = dataclasses.replace(
    RANGER, name="ranger_l2", defaults={**RANGER.defaults, "decoupled_weight_decay": False}, l2=True
)
