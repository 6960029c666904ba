"""The comparison: what a backend holds against the truth, as one row of the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from .backends.protocol import Held
from .bounds import Bound, promised, spacing, stored_spacing
from .cases import Case, Problem
from .truth import Truth


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity of one case on one backend after one number of steps.

    case, backend, steps, quantity: where the numbers come from; `quantity` is "parameter" (the number that parameter
        and compensation stand for), "exp_avg" or "exp_avg_sq".
    relative_error: ||x - r|| / ||r||, 2-norms over all elements of the case, r the float64 reference (||x - r|| itself
        where r is zero); `relative_bound` is its bound.
    units: |x - r| in units in the last place of what the backend stores (of the pair where it is compensated), at the
        element that comes nearest to its bound; `units_bound` is the bound of that element.
    element_ratio: |x - r| / bound at that element.
    failure: why there are no numbers: the backend raised this.
    within: whether both bounds hold.
    """

    case: str
    backend: str
    steps: int
    quantity: str
    relative_error: float
    relative_bound: float
    units: float
    units_bound: float
    element_ratio: float
    failure: str | None = None

    @property
    def within(self) -> bool:
        """Whether both bounds hold. A NaN breaks them."""
        return self.failure is None and self.relative_error <= self.relative_bound and self.element_ratio <= 1.0

    def as_json(self) -> dict[str, object]:
        """The row with the verdict, with null for numbers that are not finite (JSON has no NaN)."""
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return {**fields, "within": self.within}


def numbers(problem: Problem, held: Mapping[str, Held]) -> dict[str, np.ndarray]:
    """What a backend's arrays stand for: flat float64 arrays by quantity, without those that it does not keep.

    A kahan pair stands for p + k, taken exactly. A split pair (bfloat16 p, int16 k) stands for the float32 number whose
    bits are p's, followed by sixteen zeros, plus k.
    """
    found = {"parameter": problem.flatten({name: _number(tensor) for name, tensor in held.items()})}
    for quantity in ("exp_avg", "exp_avg_sq"):
        arrays = {name: getattr(tensor, quantity) for name, tensor in held.items()}
        if all(array is not None for array in arrays.values()):
            found[quantity] = problem.flatten(arrays)
    return found


def rows(case: Case, backend: str, held: Mapping[str, Held], truth: Truth) -> list[Row]:
    """One row a quantity."""
    bounds = truth.bounds[case.storage]
    return [
        _row(case, backend, truth.steps, quantity, value, truth.values[quantity], bounds[quantity])
        for quantity, value in numbers(case.problem, held).items()
    ]


def failed(case: Case, backend: str, steps: int, failure: str) -> Row:
    """The row of a backend that raised before it came to `steps`."""
    nan = math.nan
    return Row(case.name, backend, steps, "parameter", nan, nan, nan, nan, nan, failure)


def _row(case: Case, backend: str, steps: int, quantity: str, value: np.ndarray, true: np.ndarray, bound: Bound) -> Row:
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(value - true)
        ratio = np.where(error == 0.0, 0.0, np.inf)
        np.divide(error, bound.elements, out=ratio, where=bound.elements > 0.0)
    norm = float(np.linalg.norm(true)) or 1.0
    # a NaN is the worst element of all
    worst = int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)))
    if quantity == "parameter":
        unit = stored_spacing(case.problem.dtype, case.storage.compensation, true[worst])
    else:
        unit = spacing(getattr(case.storage.moments(case.problem), quantity), true[worst])
    return Row(
        case.name,
        backend,
        steps,
        quantity,
        float(np.linalg.norm(error)) / norm,
        min(bound.norm / norm, promised(case.name)) if quantity == "parameter" else bound.norm / norm,
        float(error[worst] / unit),
        float(bound.elements[worst] / unit),
        float(ratio[worst]),
    )


def _number(held: Held) -> np.ndarray:
    parameter, compensation = held.parameter, held.compensation
    wide = np.asarray(parameter).astype(np.float64)
    if compensation is None:
        return wide
    if compensation.dtype == np.int16:
        bits = np.asarray(parameter).view(np.uint16).astype(np.int64) << 16
        return (bits + compensation).astype(np.uint32).view(np.float32).astype(np.float64)
    return wide + compensation.astype(np.float64)
