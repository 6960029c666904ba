"""The comparison of a backend's numbers with the truth: a row of the report, or the reason why there are none.

A section of the suite yields findings: rows, made by `rows`, `against`, `identical`, `differing` and `failed`, and refusals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..core.errors import InvalidArgumentError
from .backends.calls import checked, described
from .backends.protocol import Held
from .bounds import Bound, promised, spacing, stored_spacing
from .cases import Case, Problem
from .truth import Truth


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity of one case on one backend after one number of steps.

    case, backend, steps, quantity: where the numbers come from; `quantity` is "parameter" (the number that parameter
        and compensation stand for), a field of the rule ("exp_avg"), or what a section calls it.
    relative_error: ||x - r|| / ||r||, 2-norms over all elements of the case, r the float64 reference (||x - r|| itself
        where r is zero); `relative_bound` is its bound. Of bits that are compared: the share of elements that differ.
    units: |x - r| in units in the last place of what the backend stores (of the pair where it is compensated), at the
        element that comes nearest to its bound; `units_bound` is the bound of that element. Of bits: how many differ.
    element_ratio: |x - r| / bound at that element.
    failure: why there are no numbers: which method of the backend raised what.
    data: more of it, for figures: what JSON can hold; of a parameter `undecided`, as in `Bound`, where it is not 0.
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
    data: Mapping[str, Any] | None = None

    @property
    def judged(self) -> bool:
        """Whether there is a bound; a row without one is for information."""
        return self.relative_bound != math.inf

    @property
    def within(self) -> bool:
        """Whether both bounds hold. A NaN breaks them."""
        return self.failure is None and self.relative_error <= self.relative_bound and self.element_ratio <= 1.0

    @property
    def ratio(self) -> float:
        """The largest error / bound of the row. Infinity for a NaN, and if the backend raised."""
        over = self.relative_error / self.relative_bound if self.relative_bound else math.inf if self.relative_error else 0.0
        return math.inf if math.isnan(over) or math.isnan(self.element_ratio) else max(over, self.element_ratio)

    def as_json(self) -> dict[str, object]:
        """The row with the ratio and the verdict; null is for numbers that are not finite, and for no verdict."""
        fields = {**dataclasses.asdict(self), "ratio": self.ratio, "within": self.within if self.judged else None}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
        }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A case that a backend does not run, and the reason."""

    case: str
    backend: str
    reason: str


Finding = Row | Refusal


def numbers(problem: Problem, held: Mapping[str, Held]) -> dict[str, np.ndarray]:
    """Return the numbers that a backend's arrays represent: flat float64 arrays by quantity; missing ones are left out.

    A kahan pair stands for p + k, taken exactly. A split pair (bfloat16 p, int16 k) stands for the float32 number whose
    bits are p's, followed by sixteen zeros, plus k.

    Raises:
        InvalidArgumentError: as `checked` does.
    """
    checked(problem, held)
    found = {"parameter": problem.flatten({name: _number(tensor) for name, tensor in held.items()})}
    for field in problem.rule.fields:
        arrays = {name: tensor.get(field.name) for name, tensor in held.items()}
        if all(array is not None for array in arrays.values()):
            found[field.name] = problem.flatten(arrays)  # type: ignore[arg-type]
    return found


def rows(
    case: Case, backend: str, held: Mapping[str, Held], truth: Truth, *, flushes: bool = True, name: str | None = None
) -> list[Row]:
    """Return a row for each quantity that a backend holds after `truth.steps` updates.

    Args:
        flushes: as in `Truth.bounds_of`.
        name: what the rows call the case; None: its name.
    """
    bounds = truth.bounds_of(case.storage, flushes=flushes)
    units: dict[str, Unit] = {
        "parameter": functools.partial(stored_spacing, case.problem.dtype, case.storage.compensation),
    }
    dtypes = case.storage.moments(case.problem)
    fields = zip(case.problem.rule.fields, dtypes, strict=True)
    units |= {field.name: functools.partial(spacing, dtype) for field, dtype in fields}
    found = [
        against(case.name, backend, truth.steps, quantity, value, truth.values[quantity], bounds[quantity], units[quantity])
        for quantity, value in numbers(case.problem, held).items()
    ]
    undecided = bounds["parameter"].undecided
    return [
        dataclasses.replace(
            row, case=name or case.name, data={"undecided": undecided} if undecided and row.quantity == "parameter" else None
        )
        for row in found
    ]


Unit = Callable[[np.ndarray], np.ndarray]
"""The distance between neighbouring stored numbers around given ones, as `functools.partial(bounds.spacing, "float32")`."""


def against(
    case_name: str, backend: str, steps: int, quantity: str, value: np.ndarray, true: np.ndarray, bound: Bound, unit: Unit
) -> Row:
    """Return the row that compares numbers with the true ones.

    Args:
        case_name, backend, steps, quantity: as in `Row`.
        value, true: flat float64 arrays of one size.
        bound: how far they may differ. Where the true number is not finite, the other must not be finite either, and
            nothing is added to the norm.
        unit: see `Unit`.

    Raises:
        InvalidArgumentError: the bound of a finite number is not finite, so that nothing could break it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(true)
        error = np.where(finite, np.abs(value - true), np.where(np.isfinite(value), np.inf, 0.0))
        ratio = np.where(error == 0.0, 0.0, np.inf)
        np.divide(error, bound.elements, out=ratio, where=bound.elements > 0.0)
    if not np.isfinite(bound.elements[finite]).all() or math.isnan(bound.norm):
        raise InvalidArgumentError(f"bound of {quantity} is not finite; nothing could break it.")
    norm = float(np.linalg.norm(true[finite])) or 1.0
    norm_bound = bound.norm if finite.all() else min(bound.norm, float(np.linalg.norm(bound.elements[finite])))
    # a NaN is the worst element of all
    worst = int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)))
    last_place = unit(true[worst])
    return Row(
        case_name,
        backend,
        steps,
        quantity,
        float(np.linalg.norm(error)) / norm,
        min(norm_bound / norm, promised(case_name)) if quantity == "parameter" else norm_bound / norm,
        float(error[worst] / last_place),
        float(bound.elements[worst] / last_place),
        float(ratio[worst]),
    )


def identical(case_name: str, backend: str, steps: int, quantity: str, one: np.ndarray, other: np.ndarray) -> Row:
    """Return the row that checks whether two arrays of one dtype are equal, bit for bit.

    The relative error is the share of elements that differ, its bound 0; the units are how many do.
    """
    count = differing_elements(one, other)
    return Row(case_name, backend, steps, quantity, count / max(one.size, 1), 0.0, count, 0.0, math.inf if count else 0.0)


def differing(case_name: str, backend: str, other_backend: str, steps: int, quantity: str, count: int, elements: int) -> Row:
    """The row of a comparison of two backends where nothing is promised: `count` of the elements differ in their bits."""
    data = {"other": other_backend, "differing": count, "elements": elements}
    share = count / max(elements, 1)
    return Row(case_name, backend, steps, quantity, share, math.inf, count, math.inf, 0.0, data=data)


def differing_elements(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of elements whose bits differ in two arrays of one shape and dtype."""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise InvalidArgumentError(
            f"other is {other.dtype}{list(other.shape)}; it must be {one.dtype}{list(one.shape)} to compare bits."
        )
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return int(np.count_nonzero(np.ascontiguousarray(one).view(bits) != np.ascontiguousarray(other).view(bits)))


def failed(
    case_name: str, backend: str, steps: int, error: BaseException, quantity: str = "parameter", *, at: str | None = None
) -> Row:
    """The row of a backend that failed before it came to `steps`, with what was raised, and `at` which place."""
    nan = math.nan
    failure = described(error) if at is None else f"{at}: {described(error)}"
    return Row(case_name, backend, steps, quantity, nan, nan, nan, nan, nan, failure)


def failed_from(
    case_name: str, backend: str, steps: Iterable[int], found: Iterable[Finding], error: BaseException, *, at: str | None = None
) -> list[Row]:
    """A failed row for each of `steps` that no row of `found` has come to."""
    done = {row.steps for row in found if isinstance(row, Row)}
    return [failed(case_name, backend, count, error, at=at) for count in steps if count not in done]


def _number(held: Held) -> np.ndarray:
    parameter, compensation = held.parameter, held.compensation
    value = np.asarray(parameter).astype(np.float64)
    if compensation is None:
        return value
    if compensation.dtype == np.int16:
        bits = np.asarray(parameter).view(np.uint16).astype(np.int64) << 16
        return (bits + compensation).astype(np.uint32).view(np.float32).astype(np.float64)
    return value + compensation.astype(np.float64)
