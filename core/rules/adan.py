"""Adan (Xie et al., 2022): Nesterov's momentum through the difference of two gradients."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array
from ..debiasing import corrected_one_minus_beta
from ..hyperparameters import DECAY, POSITIVE, Hyperparameters, Scalar
from .adam_family import bounded
from .rule import Entered, Field, Fields, Rule, entered_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdanHyperparameters(Hyperparameters):
    """Those of Adan.

    Args:
        beta1: decay of the mean gradient, in [0, 1).
        beta2: decay of the mean difference of gradients, and its share of the step, in [0, 1).
        beta3: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
    """

    beta1: Annotated[Scalar, DECAY, "decay of the mean gradient"]
    beta2: Annotated[Scalar, DECAY, "decay of the mean difference of gradients, and its share of the step"]
    beta3: Annotated[Scalar, DECAY, "decay of the second moment"]
    eps: Annotated[Scalar, POSITIVE, "added to the square root of the second moment"]


class Corrections(NamedTuple):
    """1-beta1, 1-beta2 and 1-beta3, corrected for bias; beta2; and 1 where there is a previous gradient, else 0."""

    first: Scalar
    second: Scalar
    third: Scalar
    share: Scalar
    seen: Scalar


def corrections(current: AdanHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """The factors of update number `step`: the difference is 0 in the first."""
    c1, c2, c3 = (corrected_one_minus_beta(beta, step, xp) for beta in (current.beta1, current.beta2, current.beta3))
    seen = float(step != 1) if isinstance(step, numbers.Real) else xp.where(step > 1, xp.ones_like(step), xp.zeros_like(step))
    return Corrections(c1, c2, c3, current.beta2, seen)


def accumulate(
    current: AdanHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Fields:
    """Put a micro-batch into the fields; the previous gradient becomes the sum of those of this update.

    first:  m += c1*(g-m)    d += c2*(g-h-d)    n += c3*((g + beta2*(g-h))^2 - n)    h <- g
    later:  m += c1*g        d += c2*g          n += c3*(g + beta2*g)^2              h += g

    g is bounded (`adam_family.bounded`), so that what enters n is finite. g-h and beta2*g are 0 in the first update.
    """
    c1, c2, c3, share, seen = corrections
    entering, _ = bounded(gradient, xp)
    mean, difference, second_moment, previous = fields
    change = seen * (entering - previous if first else entering)
    ahead = entering + share * change
    square = ahead * ahead
    del ahead  # eager PyTorch holds one array less at its peak
    return (
        entered_mean(mean, current.beta1, c1, entering, xp, first=first),
        entered_mean(difference, current.beta2, c2, change, xp, first=first),
        entered_mean(second_moment, current.beta3, c3, square, xp, first=first),
        entering if first else previous + entering,
    )


def direction(
    current: AdanHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return (m + beta2*d)/(sqrt(n)+eps)."""
    mean, difference, second_moment, _ = fields
    return (mean + corrections[3] * difference) / (xp.sqrt(second_moment) + current.eps)


ADAN = Rule(
    name="adan",
    title="Adan: Nesterov's momentum through the difference of two gradients",
    mathematics="""
        m += c1*(g-m)    d += c2*(g-h-d)    n += c3*((g + beta2*(g-h))^2 - n)    h <- g        c = (1-beta)/(1-beta^t)
        p <- (p - lr*(m + beta2*d)/(sqrt(n)+eps)) / (1 + lr*weight_decay)        h = g in the first update
    """,
    source="Xie et al., 2022, https://arxiv.org/abs/2208.06677.",
    fields=(
        Field("exp_avg", beta="beta1"),
        Field("exp_avg_diff", beta="beta2"),
        Field("exp_avg_sq", beta="beta3", of_squares=True),
        Field("prev_grad"),
    ),
    hyperparameters=AdanHyperparameters,
    defaults={"beta1": 0.98, "beta2": 0.92, "beta3": 0.99, "eps": 1e-6, "weight_decay": 2e-2},
    corrections=corrections,
    accumulate=accumulate,
    direction=direction,
    implicit_decay=True,
)
