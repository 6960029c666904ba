"""RAdam (Liu et al., 2020): Adam whose adaptive step is rectified while the second moment has seen few gradients."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from ..array_ops import Array
from ..debiasing import one_minus_power
from ..hyperparameters import FLAG, Scalar
from . import adam_family
from .adam_family import AdamHyperparameters, Moments
from .rule import Entered, Fields, Rule

FEWEST = 5.0
"""The step is adaptive where the mean square has the variance of one over more gradients than this."""

SERIES_UP_TO = 0.25
"""The largest t*y, y = -log(beta2), of which `averaged_gradients` sums a series.

Its first term left out is 2.2e-6*(t*y/2)^12, with t beside it: 3e-16 of the sum. Beyond, the difference of two numbers of 2/y,
which is t at least, loses a factor of 2/0.25.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdamHyperparameters(AdamHyperparameters):
    """Those of RAdam.

    Args:
        decoupled_weight_decay: the decay is part of the step instead of the gradient.
    """

    decoupled_weight_decay: Annotated[bool, FLAG, "multiply weight_decay*p by lr only, instead of adding it to the gradient"]


class Corrections(NamedTuple):
    """What the moments and the step of one update are multiplied by.

    first, second: c1 and c2 of Adam. plain: 1 where the step is m, else 0. rectified: r, or 0 where the step is m.
    eps: eps/sqrt(1-beta2^t): it is added to the square root of the second moment before that is debiased.
    """

    first: Scalar
    second: Scalar
    plain: Scalar
    rectified: Scalar
    eps: Scalar


def averaged_gradients(beta2: Scalar, step: Scalar, xp: Any) -> Scalar:
    r"""Return rho_t: over how many gradients a mean without decay has the variance of the debiased second moment.

        rho_t = rho_inf - 2t*beta2^t/(1-beta2^t)        rho_inf = (1+beta2)/(1-beta2)

    With y = -log(beta2), rho_inf = coth(y/2), and rho_t = t - (2/y)*(g(t*y/2) - g(y/2)) with g(x) = x*coth(x) - 1, of which the
    series starts x^2/3 - x^4/45. In float32 the difference above would lose rho_t, about t, beside rho_inf for small t*y.

    Args:
        beta2: a number or a 0-d array.
        step: t, a 0-d array or a numpy number.
        xp: the array namespace.
    """
    y = -math.log(float(beta2)) if isinstance(beta2, numbers.Real) else -xp.log(beta2)
    z = step * y

    def g(x: Scalar) -> Scalar:
        square = x * x
        return square / 3 * (1 - square / 15 * (1 - square * 2 / 21 * (1 - square / 10 * (1 - square * 10 / 99))))

    whole: Any = beta2  # pyright would take it for a complex number
    difference = (1 + whole) / (1 - whole) + 2 * step * xp.exp(-z) / xp.expm1(-z)
    return xp.where(z < SERIES_UP_TO, step - 2 / y * (g(z / 2) - g(y / 2)), difference)


def corrections(current: RAdamHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """The factors of update number `step`, with r = sqrt((rho_t-4)(rho_t-2)*rho_inf / ((rho_inf-4)(rho_inf-2)*rho_t))."""
    beta2 = current.beta2
    eps = current.eps / one_minus_power(beta2, step, xp) ** 0.5
    c1, c2 = adam_family.bias_corrections(current, step, xp)
    most = (1 + beta2) / (1 - beta2)
    if isinstance(beta2, numbers.Real):
        if most <= FEWEST:
            return Corrections(c1, c2, 1.0, 0.0, eps)
        if isinstance(step, numbers.Real):
            plain, rectified = _rectification(beta2, most, np.float64(step), np)
            return Corrections(c1, c2, float(plain), float(rectified), eps)
    return Corrections(c1, c2, *_rectification(beta2, most, step, xp), eps)


def _rectification(beta2: Scalar, most: Scalar, step: Scalar, xp: Any) -> tuple[Scalar, Scalar]:
    """Return (1, 0) where the step is m, else (0, r)."""
    count = averaged_gradients(beta2, step, xp)
    ratio = (count - 4) / (most - 4) * ((count - 2) / (most - 2)) * (most / count)
    rectified = xp.sqrt(xp.clip(ratio, 0.0, None))
    zero = xp.zeros_like(rectified)
    return xp.where(count > FEWEST, zero, zero + 1), xp.where(count > FEWEST, rectified, zero)


def accumulate(
    current: RAdamHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Moments:
    """Put a micro-batch into the moments, as Adam does."""
    of_adam = adam_family.Corrections(*corrections[:2])
    return adam_family.accumulate(current, of_adam, fields, gradient, xp, first=first)


def direction(
    current: RAdamHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return r*m/(sqrt(v)+eps), or m while the second moment has seen too few gradients."""
    _, _, plain, rectified, eps = corrections
    exp_avg, exp_avg_sq = fields
    return exp_avg * (plain + rectified / (xp.sqrt(exp_avg_sq) + eps))


def chosen(own: Mapping[str, Any]) -> Rule:
    """Return the row of these settings."""
    return RADAMW if own["decoupled_weight_decay"] else RADAM


RADAM = Rule(
    name="radam",
    title="Adam that starts with plain momentum, until its second moment has seen enough gradients",
    mathematics="""
        g += weight_decay*p    m += c1*(g-m)    v += c2*(g*g-v)        c = (1-beta)/(1-beta^t)
        p <- p - lr*m    where rho <= 5, else    p <- p - lr*r*m/(sqrt(v) + eps/sqrt(1-beta2^t))
        r = sqrt((rho-4)(rho-2)*rho_inf / ((rho_inf-4)(rho_inf-2)*rho))
        rho = rho_inf - 2t*beta2^t/(1-beta2^t)        rho_inf = 2/(1-beta2) - 1
    """,
    source="Liu et al., 2020, https://arxiv.org/abs/1908.03265.",
    fields=adam_family.FIELDS,
    hyperparameters=RAdamHyperparameters,
    defaults={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False},
    corrections=corrections,
    accumulate=accumulate,
    direction=direction,
    l2=True,
    variant=chosen,
)
RADAMW = dataclasses.replace(RADAM, name="radamw", defaults={**RADAM.defaults, "decoupled_weight_decay": True}, l2=False)
