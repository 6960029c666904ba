r"""The moments, the mean square and the direction: the elementwise arithmetic of the specification.

Every array here is in the compute dtype. `exp_avg` and `exp_avg_sq` are *debiased* running means: instead of decaying by
beta and dividing by 1-beta^t at each use, the decay itself is debiased, with the bias-correction factors

    c1 = (1-beta1)/(1-beta1^t)        c2 = (1-beta2)/(1-beta2^t)

so that m and v are at every t what Adam's m/(1-beta1^t) and v/(1-beta2^t) are. Where a beta changes after t updates, the
moment is expressed under the new one first (`core.update.rebiased`): Adam's own m and v do not depend on it.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from .array_ops import Array
from .hyperparameters import Hyperparameters, Scalar

SMALLEST_NORMAL_FLOAT32 = 2.0**-126
"""Floor of eps^2, which would be zero in float32 for an eps below 1e-19 and make 0/0 of a zero gradient."""


def is_zero(value: Scalar) -> bool:
    """Whether a Python number is zero, so that its term can be left out; arrays are not read."""
    return isinstance(value, numbers.Real) and value == 0


class Moments(NamedTuple):
    """The debiased running means of a gradient and of its square."""

    exp_avg: Array
    exp_avg_sq: Array


class Corrections(NamedTuple):
    """1-beta1 and 1-beta2, corrected for the bias of moments that start at zero: c1 and c2."""

    first: Scalar
    second: Scalar


def one_minus_power(beta: Scalar, step: Scalar, xp: Any) -> Scalar:
    r"""1-beta^t = -expm1(t log(beta)): the naive difference loses digits in float32.

    Args:
        beta: in [0, 1); a Python number, or a 0-d array.
        step: t, a number of updates, from 1 on; a Python number, or a 0-d array.
        xp: the array namespace, used where one of the two is an array.
    """
    if not isinstance(beta, numbers.Real):
        return -xp.expm1(step * xp.log(beta))
    if beta == 0:
        return 1.0
    if isinstance(step, numbers.Real):
        return -math.expm1(float(step) * math.log(beta))
    return -xp.expm1(step * math.log(beta))


def corrected_one_minus_beta(beta: Scalar, step: Scalar, xp: Any) -> Scalar:
    """(1-beta)/(1-beta^t). Arguments as in `one_minus_power`, t the number of this update."""
    one_minus_beta = 1.0 - (float(beta) if isinstance(beta, numbers.Real) else beta)
    return one_minus_beta / one_minus_power(beta, step, xp)


def debiasing_ratio(before: Scalar, after: Scalar, step: Scalar, xp: Any) -> Scalar:
    """(1-before^t)/(1-after^t), by which a moment debiased under one beta becomes that under another; 1 where nothing changes.

    Args:
        before, after: beta1 or beta2.
        step: t, the number of updates so far, from 0 on.
        xp: as in `one_minus_power`.
    """
    if all(isinstance(value, numbers.Real) for value in (before, after, step)):
        return 1.0 if before == after or step == 0 else one_minus_power(before, step, xp) / one_minus_power(after, step, xp)
    ratio = one_minus_power(before, step, xp) / one_minus_power(after, step, xp)
    return xp.where((before != after) & (step > 0), ratio, 1.0)


def bias_corrections(hyperparameters: Hyperparameters, step: Scalar, xp: Any) -> Corrections:
    """c1 and c2 of update number `step`."""
    return Corrections(
        corrected_one_minus_beta(hyperparameters.beta1, step, xp), corrected_one_minus_beta(hyperparameters.beta2, step, xp)
    )


def reset_where_beta_is_zero(moments: Moments, hyperparameters: Hyperparameters, xp: Any) -> Moments:
    """Replace moments whose beta is 0 by zeros: m + (g-m) would keep rounding errors of m."""

    def of(moment: Array, beta: Scalar) -> Array:
        if isinstance(beta, numbers.Real):
            return xp.zeros_like(moment) if beta == 0 else moment
        return xp.where(beta == 0, xp.zeros_like(moment), moment)

    return Moments(of(moments.exp_avg, hyperparameters.beta1), of(moments.exp_avg_sq, hyperparameters.beta2))


def first_moments(moments: Moments, gradient: Array, corrections: Corrections) -> Moments:
    """Put the first, or only, micro-batch of an update into the moments: m += c1*(g-m), v += c2*(g*g-v)."""
    exp_avg, exp_avg_sq = moments
    return Moments(
        exp_avg + corrections.first * (gradient - exp_avg),
        exp_avg_sq + corrections.second * (gradient * gradient - exp_avg_sq),
    )


def later_moments(moments: Moments, gradient: Array, corrections: Corrections) -> Moments:
    """Put a later micro-batch into the moments: m += c1*g, v += c2*g*g (AdamA, https://arxiv.org/abs/2305.19982)."""
    exp_avg, exp_avg_sq = moments
    return Moments(
        exp_avg + corrections.first * gradient,
        exp_avg_sq + corrections.second * (gradient * gradient),
    )


def mean_square(gradient: Array, exp_avg_sq: Array, eps: Scalar, xp: Any) -> Array:
    """Return mean(g*g / max(v, eps^2)), 0-d: about 1 if the gradient is as large as the second moment expects."""
    if math.prod(gradient.shape) == 0:
        return xp.zeros_like(xp.sum(gradient))
    square = eps * eps
    floor = max(square, SMALLEST_NORMAL_FLOAT32) if isinstance(square, numbers.Real) else square
    # Divide first: XLA would keep g*g, which the second moment needs too, in memory until the mean is known.
    return xp.mean(gradient / xp.clip(exp_avg_sq, floor, None) * gradient)


def clipped_learning_rate(learning_rate: Scalar, mean_square: Array, xp: Any) -> Array:
    """eta = lr / max(1, sqrt(mean_square))."""
    return learning_rate / xp.clip(xp.sqrt(mean_square), 1.0, None)


def direction(moments: Moments, parameter: Array, eps: Scalar, decay_rate: Scalar, xp: Any) -> Array:
    """Return m/(sqrt(v)+eps) + decay_rate*p, to which the step is proportional.

    The decay is folded into the step: p*(1 - eta*decay) would round eta*decay away.
    """
    step = moments.exp_avg / (xp.sqrt(moments.exp_avg_sq) + eps)
    if is_zero(decay_rate):
        return step
    return step + decay_rate * parameter
