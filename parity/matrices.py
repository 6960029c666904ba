r"""How far Muon's orthogonalised matrix may be off: a bound in the Frobenius norm, which bounds every element, too.

The matrix u, off by E, is divided by its norm, and then ns_steps times X <- f(X) = a*X + (b*A + c*A*A)*X with A = X*X^T. f
takes the singular values s of X to p(s) = a*s + b*s^3 + c*s^5, and leaves its singular vectors. Two things happen to an error:

**It goes through f.** In the bases of singular vectors of X the derivative of f multiplies each part of an error by a divided
difference of p, (p(s)-p(t))/(s-t) or (p(s)+p(t))/(s+t) = (p(s)-p(-t))/(s-(-t)) (Noferini, 2017,
https://doi.org/10.1137/16M1060480), which is a value of p' between -S and S, S being the largest singular value. The parts are
orthogonal to each other. So an error d in the Frobenius norm becomes at most

    L*d        L = max |p'(s)| over |s| <= S + d

as no matrix on the way from X to X + d has a larger singular value than S + d. With Muon's coefficients L is p'(0) = 3.44, and
five steps multiply an error by 485 at most.

**It gets new roundings.** A product of matrices with n terms a sum, in whatever order, is off by g(n)*||P||*||Q|| at most, with
g(n) = n*u/(1-n*u), in the Frobenius norm (Higham, 2002, chapter 3); a sum by u of its result. The norm of N elements is off by
(N/2 + 3)*u of itself, the two quotients by 2 u each.

Without an error of u the bound is about 1% of the norm of a 17 x 43 matrix in float32, and 3e-11 of it in float64. In bfloat16,
in which torch iterates, and penstock by default, it would be more than the matrix itself: cases iterate in the compute dtype
(`rules.EXACT`). The reference's singular value decomposition is off by DECOMPOSITION*max(m, n) u of float64, before f and
after.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.rules.muon import scale
from .bounds import SIDES, unit_roundoff
from .noise import Noise, both
from .tracked import Namespace, Tracked

DECOMPOSITION = 4.0
"""LAPACK's decomposition is off by a small multiple of max(m, n) u of the norm."""

Coefficients = tuple[float, float, float]


def orthogonalised(xp: Namespace, given: Any, direction: Tracked) -> Tracked:
    """Return the step of a matrix, under Muon's hyperparameters."""
    u, off = direction.value, float(np.linalg.norm(np.zeros(direction.shape) + direction.most))
    if not u.size:
        return direction
    unit, size = unit_roundoff(xp.dtype), max(float(np.linalg.norm(u)), float(given.eps))
    own = DECOMPOSITION * max(u.shape) * unit_roundoff("float64")
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / size
    error = 2.0 * off / size + (u.size / 2.0 + 7.0) * unit + own
    a, b, c = coefficients = given.ns_coefficients
    for _ in range(given.ns_steps):
        largest, norm = float(np.abs(values).max()) + error, float(np.linalg.norm(values)) + error
        error = _largest_slope(coefficients, largest) * error + _roundings(coefficients, largest, norm, u.shape, unit)
        values = a * values + b * values**3 + c * values**5
    error += (2.0 * unit + own * SIDES[xp.dtype]) * (float(np.linalg.norm(values)) + error)
    factor = scale(given, u.shape)
    return Tracked(xp, factor * (left * values) @ right, {}, Noise(linear=both(np.full(u.shape, factor * error))))


def _largest_slope(coefficients: Coefficients, largest: float) -> float:
    """Return the largest |p'(s)| for s in [0, largest]: at the ends, or where p''(s) = 0."""
    a, b, c = coefficients
    squares = [0.0, largest**2]
    if c and 0.0 < -3.0 * b / (10.0 * c) < largest**2:
        squares.append(-3.0 * b / (10.0 * c))
    return max(abs(a + 3.0 * b * square + 5.0 * c * square**2) for square in squares)


def _roundings(coefficients: Coefficients, largest: float, norm: float, shape: tuple[int, ...], unit: float) -> float:
    """Return what one iteration rounds at most, of a matrix whose spectral and Frobenius norms are at most these."""
    (a, b, c), short, long = map(abs, coefficients), min(shape), max(shape)

    def sums(terms: int) -> float:
        return (terms + 2) * unit / (1.0 - (terms + 2) * unit)  # with the product by a coefficient, and what is added

    of_gram = sums(long) * norm**2
    gram, square = largest * norm + of_gram, largest**2 + of_gram  # ||X*X^T|| <= ||X||_2 * ||X||, and ||X*X^T||_2
    polynomial = (b + c * square) * gram
    of_polynomial = (b + 2.0 * c * square) * of_gram + sums(short) * (c * gram**2 + b * gram + polynomial)
    return largest * of_polynomial + sums(short) * ((polynomial + of_polynomial) * norm + a * norm)
