r"""The bounds of event sequences: `parity.bounds` for one tensor at a time, and what micro-batches and sums add to it.

Tensors have numbers of updates of their own, so each has a `Propagation` of its own. Beyond plain updates there are

    gradients   that were added up or clipped: what a backend holds is off by dg. It enters the moments as
                dm += c1*dg, dv += c2*(2|g| dg + dg^2), and the mean square of StableAdamW with 2|g| dg / v
    in-state    K micro-batches. The first is a plain update of the moments. Each later one, m_j = m_{j-1} + c1*g_j and
                v_j = v_{j-1} + c2*g_j^2, rounds its product (for v: the square, too), the sum, and once more when the
                moments are stored; nothing decays. All of it is added linearly: there are few.
    mean square sum over j of mean(g_j^2/v_j), v_j before the later ones: the error of v weighs more there than in the
                last one, by v_K/v_j; and the K sums round
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ...core.dtypes import compute_dtype
from ..bounds import CORRECTION, SIDES, Bound, RoundingErrors, reference_debiasing, spacing, unit_roundoff
from ..propagation import Coefficients, MomentErrors, Point, Propagation
from .recorded import EventCase


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The reference around one micro-batch of a tensor: flat float64 arrays.

    gradient: as the moments take it, with Adam's L2 term in the first. error: what a backend's gradient is off by, at most.
    exp_avg, exp_avg_sq: after it, debiased for the update that it belongs to.
    """

    gradient: np.ndarray
    error: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray


class TensorErrors:
    """The rounding errors of one tensor of a case, along the reference's trajectory."""

    def __init__(self, case: EventCase, name: str) -> None:
        self._case = case
        problem = case.problem((name,))
        self._compute = compute_dtype(case.dtype)
        self._propagation = Propagation(problem, case.storage, problem.setting.element_count)

    def bounds(self) -> dict[str, Bound]:
        """On parameter, exp_avg and exp_avg_sq after the last update."""
        return self._propagation.bounds()

    def advance(
        self,
        step: int,
        learning_rate: float,
        micro_batches: Sequence[MicroBatch],
        *,
        before: tuple[np.ndarray, np.ndarray, np.ndarray],
        parameter: np.ndarray,
    ) -> None:
        """One update.

        Args:
            step: its number, from 1 on.
            before: exp_avg, exp_avg_sq and the parameter before it.
            parameter: after it.
        """
        propagation, moments, problem = self._propagation, self._propagation.moments, self._propagation.problem
        given = self._case.hyperparameters(learning_rate)
        coefficients = Coefficients(learning_rate, given.decay_rate, given.beta1, given.beta2)
        first, last = micro_batches[0], micro_batches[-1]
        own = propagation.parameter.bound().elements if problem.rule.l2 else None
        moments.advance(Point(step, first.gradient, *before, first.exp_avg, first.exp_avg_sq, parameter, coefficients), own)
        for later in micro_batches[1:]:
            self._add_micro_batch(moments, step, later)
        self._add_gradient_errors(moments, step, micro_batches)
        # The gradient for which g^2/v is the sum over the micro-batches; the moments have advanced already.
        gradient = np.sqrt(sum(_ratio(micro, micro.exp_avg_sq, problem.rule.defaults["eps"]) for micro in micro_batches))
        gradient = gradient * np.maximum(np.sqrt(last.exp_avg_sq), problem.rule.defaults["eps"])
        propagation.advance(Point(step, gradient, *before, last.exp_avg, last.exp_avg_sq, parameter, coefficients))
        if problem.rule.clips_update:
            self._add_mean_square(learning_rate, before[2], micro_batches)

    def _add_micro_batch(self, moments: MomentErrors, step: int, micro: MicroBatch) -> None:
        square = micro.gradient**2
        for name, beta, magnitude, roundings in (
            ("exp_avg", moments.problem.rule.betas[0], np.abs(micro.gradient), 1),
            ("exp_avg_sq", moments.problem.rule.betas[1], square, 2),
        ):
            errors: RoundingErrors = getattr(moments, name)
            value, dtype = np.abs(getattr(micro, name)), moments.dtypes[name]
            unit = SIDES[self._compute] * unit_roundoff(self._compute)
            errors.linear += unit * ((CORRECTION + roundings) * _complement(beta, step) * magnitude + value)
            if self._compute == "float64":
                errors.passing = value * reference_debiasing(beta, step)
            if dtype != self._compute:
                stored = spacing(dtype, value + errors.linear)
                errors.linear += spacing(dtype, value + errors.linear + stored / 2.0) / 2.0

    def _add_gradient_errors(self, moments: MomentErrors, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        beta1, beta2 = moments.problem.rule.betas
        for micro in micro_batches:
            moments.exp_avg.linear += _complement(beta1, step) * micro.error
            squares = 2.0 * np.abs(micro.gradient) * micro.error + micro.error**2
            moments.exp_avg_sq.linear += _complement(beta2, step) * squares

    def _add_mean_square(self, learning_rate: float, parameter: np.ndarray, micro_batches: Sequence[MicroBatch]) -> None:
        """What errors of gradients and of earlier v do to eta: half of what they do to the mean square, relatively."""
        problem, last, count = self._propagation.problem, micro_batches[-1], parameter.size
        eps, unit = problem.rule.defaults["eps"], unit_roundoff(self._compute)
        ratios = [_ratio(micro, micro.exp_avg_sq, eps) for micro in micro_batches]
        total = float(sum(ratio.sum() for ratio in ratios))
        if total <= 0.25 * count:  # as in `Propagation`: no error brings the mean above 1
            return
        moment = self._propagation.moments.exp_avg_sq
        wrong = moment.linear + moment.worst
        change = 0.0
        for micro, ratio in zip(micro_batches, ratios, strict=True):
            floor = np.maximum(micro.exp_avg_sq, eps**2)
            relative = np.minimum(wrong / floor, 0.9)
            change += float(np.sum(np.abs(micro.gradient) * micro.error / floor + micro.error**2 / (2.0 * floor)))
            if micro is not last:
                change += float(np.sum(ratio * (1.0 / np.sqrt(1.0 - relative) - 1.0)))
        roundings = (len(micro_batches) - 1) * (count + 4) / 2.0 * SIDES[self._compute] * unit
        decay = 0.0 if problem.rule.l2 else problem.setting.weight_decay
        step = np.abs(last.exp_avg) / (np.sqrt(last.exp_avg_sq) + eps) + decay * np.abs(parameter)
        self._propagation.parameter.linear += learning_rate * step * (change / total + roundings)


def _complement(beta: float, step: int) -> float:
    return (1.0 - beta) / -math.expm1(step * math.log(beta))


def _ratio(micro: MicroBatch, exp_avg_sq: np.ndarray, eps: float) -> np.ndarray:
    """The elements of the mean square of one micro-batch."""
    return micro.gradient**2 / np.maximum(exp_avg_sq, eps**2)
