r"""The bounds of trajectories: rounding errors, amplified by a model.

A gradient makes an update, the parameters make the next gradient: here no recursion over single elements follows the
errors, as in `parity.bounds`. How much they are amplified is measured on the float64 reference, by Monte Carlo arithmetic
(Parker, 1997; Denis, de Oliveira Castro and Petit, 2016, https://doi.org/10.1109/ARITH.2016.31). It runs again with every
operand x of every operation of the model, forward and backward, replaced by x*(1 + delta*xi), and what an update stores
likewise, xi uniform in [-1, 1] and independent. To first order, with J the linear map from all these perturbations
to the trajectory,

    disturbed - truth = D = delta * J xi                           a correct implementation - truth = u * J rho

where u is the unit roundoff of its dtype and |rho| <= 1 for an operation that rounds once. With u/delta * ||D|| for the
size of u * ||J rho||,

    ||x - r||  <=  SIDES * sqrt(TERMS) * CHANCE * (u/delta) * max over the samples of ||D||

    TERMS   an operation may round more often than once: a sum of K terms of size a rounds K-1 partial sums. If these have
            one sign, sqrt(sum_k (k a)^2) = a*K^1.5/sqrt(3), where the result, an operand of the next operation, was disturbed
            by K*a: sqrt(K/3) times too little. If the signs are random, a*K/sqrt(2), where the operands of the sum were
            disturbed by a*sqrt(2K): sqrt(K)/2 times too little. So never more than sqrt(K), and K = TERMS is the longest sum
            in the model. Elementary functions that are off by some units stay below that as well.
    CHANCE  a sample of ||J rho|| against the expectation of its square: ||J rho||^2 <= (1 + 2 sqrt(L) + 2 L) E with
            L = ln(1/RISK), the bound of `parity.bounds` for the 2-norm in its worst case, where all errors add up in one
            direction. They do not: they have hundreds of directions, so that a sample of ||D|| stands for the root of E.
    SIDES   in float64 the truth rounds, too.

It is a bound for the norm, over all parameters and for each tensor by itself; an element is bounded by its tensor's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from ..bounds import RISK, SIDES, Bound, unit_roundoff
from .cases import TERMS, Trajectory, tensor_numbers
from .disturbance import AMOUNT
from .truth import disturbed, truth

CHANCE = math.sqrt(1.0 + 2.0 * math.sqrt(math.log(1.0 / RISK)) + 2.0 * math.log(1.0 / RISK))


@functools.lru_cache(maxsize=8)
def bounds(case: Trajectory) -> Mapping[int, Mapping[str, Bound]]:
    """Return the bounds on parameters and moments after each of the case's numbers of steps."""
    factor = SIDES[case.dtype] * math.sqrt(TERMS) * CHANCE * unit_roundoff(case.dtype) / AMOUNT
    true, samples, numbers = truth(case, 0.0), disturbed(case), tensor_numbers()

    def bound(steps: int, quantity: str) -> Bound:
        differences = [sample[steps][quantity] - true[steps][quantity] for sample in samples]
        norm = max(float(np.linalg.norm(difference)) for difference in differences)
        of_tensors = np.max([np.sqrt(np.bincount(numbers, difference**2)) for difference in differences], axis=0)
        return Bound(factor * norm, factor * of_tensors[numbers])

    return {steps: {quantity: bound(steps, quantity) for quantity in true[steps]} for steps in true}
