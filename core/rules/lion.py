"""Lion (Chen et al., 2023): the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array
from ..hyperparameters import DECAY, Hyperparameters, Scalar
from .rule import Entered, Field, Fields, Rule, entered_mean, forgotten


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionHyperparameters(Hyperparameters):
    """Those of Lion.

    Args:
        beta1: decay of the momentum inside the step, in [0, 1).
        beta2: decay of the momentum that is kept, in [0, 1).
    """

    beta1: Annotated[Scalar, DECAY, "decay of the momentum inside the step"]
    beta2: Annotated[Scalar, DECAY, "decay of the momentum that is kept"]


class Corrections(NamedTuple):
    """1-beta1 and 1-beta2: Lion does not debias, as the sign does not depend on the momentum's size."""

    inside: Scalar
    kept: Scalar


def complements(current: LionHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """1-beta1 and 1-beta2, in every update."""
    return Corrections(1.0 - current.beta1, 1.0 - current.beta2)


def accumulate(
    current: LionHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Fields:
    """Put a micro-batch into the momentum; a later one only adds to it."""
    _, kept = corrections
    return (entered_mean(fields[0], current.beta2, kept, gradient, xp, first=first),)


def direction(
    current: LionHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return sign(m + (1-beta1)*(g-m)), with the momentum m before this gradient; NaN where that is NaN."""
    assert entered is not None  # `Rule.needs_gradient`
    inside, _ = corrections
    momentum = forgotten(entered.before[0], current.beta1, xp)
    interpolated = momentum + inside * (entered.gradient - momentum)
    return xp.where(xp.isnan(interpolated), interpolated, xp.sign(interpolated))  # torch.sign returns 0 for a NaN


LION = Rule(
    name="lion",
    title="Lion: steps of one size, in the direction of the sign of a momentum",
    mathematics="""
        p <- p - lr*(sign(beta1*m + (1-beta1)*g) + weight_decay*p)
        m <- beta2*m + (1-beta2)*g
    """,
    source="Chen et al., 2023, https://arxiv.org/abs/2302.06675.",
    fields=(Field("exp_avg"),),
    hyperparameters=LionHyperparameters,
    defaults={"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    corrections=complements,
    accumulate=accumulate,
    direction=direction,
    needs_gradient=True,
)
