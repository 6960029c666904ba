"""Debiasing: a running mean that starts at zero is stored divided by 1-beta^t, and its decay is corrected for that."""

from __future__ import annotations

import math
import numbers
from typing import Any

from .hyperparameters import Scalar


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
        before, after: the decay, earlier and now.
        step: t, the number of updates so far, from 0 on.
        xp: as in `one_minus_power`.
    """
    if all(isinstance(value, numbers.Real) for value in (before, after, step)):
        return 1.0 if before == after or step == 0 else one_minus_power(before, step, xp) / one_minus_power(after, step, xp)
    ratio = one_minus_power(before, step, xp) / one_minus_power(after, step, xp)
    return xp.where((before != after) & (step > 0), ratio, 1.0)
