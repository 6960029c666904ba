r"""The bounds of event sequences: `parity.bounds` for one tensor at a time, and what micro-batches and sums add to it.

Tensors have numbers of updates of their own, so each has a `Propagation` of its own. Beyond plain updates there are

    gradients   that were added up or clipped: what a backend holds is off by dg, an error of the rule's input. It enters
                the mean square of StableAdamW with 2|g| dg / v
    in-state    K micro-batches. The first is a plain update of the fields; what each later one rounds is added linearly, as
                there are few
    mean square sum over j of mean(g_j^2/v_j), v_j before the later ones: the error of v weighs more there than in the
                last one, by v_K/v_j; and the K sums round
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.dtypes import compute_dtype
from ..bounds import SIDES, RoundingErrors, unit_roundoff
from ..propagation import Point, Propagation
from .recorded import EventCase


class TensorErrors:
    """The rounding errors of one tensor of a case, along the reference's trajectory."""

    def __init__(self, case: EventCase, name: str) -> None:
        self._compute = compute_dtype(case.dtype)
        problem = case.problem((name,))
        self.propagation = Propagation(problem, case.storage, np.zeros(problem.setting.element_count, int))

    @property
    def errors(self) -> dict[str, RoundingErrors]:
        """Of the parameter and the fields after the last update."""
        return self.propagation.errors

    def advance(self, micro_batches: Sequence[Point]) -> None:
        """One update. The parameter changes after the last micro-batch."""
        propagation, last = self.propagation, micro_batches[-1]
        for micro in micro_batches:
            propagation.accumulate(micro)
        if not propagation.rule.clips_update:
            propagation.step(last)
            return
        # the gradient for which g^2/v is the sum over the micro-batches
        eps = last.given.eps  # type: ignore[attr-defined]
        gradient = np.sqrt(sum(_ratio(micro, eps) for micro in micro_batches))
        propagation.step(last, gradient * np.maximum(np.sqrt(last.after["exp_avg_sq"]), eps))
        self._add_mean_square(micro_batches, eps)

    def _add_mean_square(self, micro_batches: Sequence[Point], eps: float) -> None:
        """What errors of gradients and of earlier v do to eta: half of what they do to the mean square, relatively."""
        last, given = micro_batches[-1], micro_batches[-1].given
        parameter, count, unit = last.before["parameter"], last.gradient.size, unit_roundoff(self._compute)
        ratios = [_ratio(micro, eps) for micro in micro_batches]
        total = float(sum(ratio.sum() for ratio in ratios))
        if total <= 0.25 * count:  # as in `Propagation`: no error brings the mean above 1
            return
        moment = self.errors["exp_avg_sq"]
        wrong = moment.linear + moment.worst
        change = 0.0
        for micro, ratio in zip(micro_batches, ratios, strict=True):
            floor = np.maximum(micro.after["exp_avg_sq"], eps**2)
            relative = np.minimum(wrong / floor, 0.9)
            error = 0.0 if micro.error is None else micro.error
            change += float(np.sum(np.abs(micro.gradient) * error / floor + error**2 / (2.0 * floor)))
            if micro is not last:
                change += float(np.sum(ratio * (1.0 / np.sqrt(1.0 - relative) - 1.0)))
        roundings = (len(micro_batches) - 1) * (count + 4) / 2.0 * SIDES[self._compute] * unit
        step = np.abs(last.after["exp_avg"]) / (np.sqrt(last.after["exp_avg_sq"]) + eps)
        step = step + given.decay_rate * np.abs(parameter)
        self.errors["parameter"].linear += given.learning_rate * step * (change / total + roundings)


def _ratio(micro: Point, eps: float) -> np.ndarray:
    """The elements of the mean square of one micro-batch."""
    return micro.gradient**2 / np.maximum(micro.after["exp_avg_sq"], eps**2)
