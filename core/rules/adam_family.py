r"""The arithmetic of Adam and its relatives: two moments, the direction, and StableAdamW's mean square.

`exp_avg` and `exp_avg_sq` are *debiased* running means: instead of decaying by beta and dividing by 1-beta^t at each use, the
decay itself is debiased, with the bias-correction factors

    c1 = (1-beta1)/(1-beta1^t)        c2 = (1-beta2)/(1-beta2^t)
    m += c1*(g-m)                     v += c2*(g*g-v)

so that m and v are at every t what Adam's m/(1-beta1^t) and v/(1-beta2^t) are. Where a beta changes after t updates, the
moment is expressed under the new one first (`core.update.rebiased`): Adam's own m and v do not depend on it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array
from ..debiasing import corrected_one_minus_beta
from ..hyperparameters import DECAY, POSITIVE, Hyperparameters, Scalar
from .rule import Entered, Field, Fields, Rule, entered_mean

SMALLEST_NORMAL_FLOAT32 = 2.0**-126
"""Floor of eps^2, which would be zero in float32 for an eps below 1e-19 and make 0/0 of a zero gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamHyperparameters(Hyperparameters):
    """Those of Adam.

    Args:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the square root of the second moment, in (0, inf).
    """

    beta1: Annotated[Scalar, DECAY, "decay of the first moment"]
    beta2: Annotated[Scalar, DECAY, "decay of the second moment"]
    eps: Annotated[Scalar, POSITIVE, "added to the square root of the second moment"]


LARGEST = {32: 2.0**50, 64: 2.0**498}  # a dict: torch.compile of 2.6 reads no other mapping
"""The largest gradient that enters the moments, by the bits of the compute dtype.

The sum of up to 2^28-1 of their squares is finite: micro-batches add them, and `core.update.rebiased` multiplies.
"""


class Moments(NamedTuple):
    """The debiased running means of a gradient and of its square."""

    exp_avg: Array
    exp_avg_sq: Array


FIELDS = (Field("exp_avg", beta="beta1"), Field("exp_avg_sq", beta="beta2", of_squares=True))
"""What the rules of the family keep: `Moments`."""


class Corrections(NamedTuple):
    """1-beta1 and 1-beta2, corrected for the bias of moments that start at zero: c1 and c2."""

    first: Scalar
    second: Scalar


def bias_corrections(current: AdamHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """c1 and c2 of update number `step`."""
    return Corrections(corrected_one_minus_beta(current.beta1, step, xp), corrected_one_minus_beta(current.beta2, step, xp))


def bounded(gradient: Array, xp: Any) -> Moments:
    """Return what enters the moments: the gradient clipped to +-L (`LARGEST`), and its square; NaN of an infinity."""
    largest = LARGEST[xp.finfo(gradient.dtype).bits]
    square = gradient * gradient
    outside, zero_or_nan = square > largest * largest, 0.0 * gradient
    # Two selections, not the square of the first: XLA would keep what both moments use in memory, and Inductor takes longer.
    return Moments(
        xp.where(outside, xp.clip(gradient, -largest, largest) + zero_or_nan, gradient),
        xp.where(outside, largest * largest + zero_or_nan, square),
    )


def accumulate(
    current: AdamHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Moments:
    """Put a micro-batch into the moments; a later one only adds to them (AdamA, https://arxiv.org/abs/2305.19982).

    first:  m += c1*(g-m)    v += c2*(g*g-v)
    later:  m += c1*g        v += c2*g*g

    g and g*g are `bounded`.
    """
    c1, c2 = corrections
    entering, square = bounded(gradient, xp)
    return Moments(
        entered_mean(fields[0], current.beta1, c1, entering, xp, first=first),
        entered_mean(fields[1], current.beta2, c2, square, xp, first=first),
    )


def mean_square(current: AdamHyperparameters, fields: Fields, gradient: Array, xp: Any) -> Array:
    """Return mean(g*g / max(v, eps^2)), 0-d: about 1 if the gradient is as large as the second moment expects."""
    if math.prod(gradient.shape) == 0:
        return xp.zeros_like(xp.sum(gradient))
    square = current.eps * current.eps
    floor = max(square, SMALLEST_NORMAL_FLOAT32) if isinstance(square, numbers.Real) else square
    # Divide first: XLA would keep g*g, which the second moment needs too, in memory until the mean is known. For the same
    # reason this is the whole gradient, not the bounded one; where the mean is infinite, the step is 0.
    return xp.mean(gradient / xp.clip(fields[1], floor, None) * gradient)


def direction(
    current: AdamHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return m/(sqrt(v)+eps)."""
    exp_avg, exp_avg_sq = fields
    return exp_avg / (xp.sqrt(exp_avg_sq) + current.eps)


def is_member(rule: Rule) -> bool:
    """Whether a rule's arithmetic is that of this file, for which backends may have programs of their own."""
    own = (accumulate, direction, mean_square)
    return (rule.accumulate, rule.direction, rule.mean_square or mean_square) == own
