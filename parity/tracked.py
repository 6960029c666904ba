r"""Arrays that carry what their float64 numbers may be off by, and the array namespace for them.

The functions of a rule (`core.rules`) run on them unchanged, and so say themselves what each of their operations rounds and
what becomes of the errors that come in. To first order a result of them is

    value + sum over the inputs of slope * error of the input + noise

Slopes have signs: in m + c*(g-m) that of m is 1-c. Noise has none; it is what the operations round, and the errors of inputs
behind a function that is not linear. There (the root, a reciprocal) it is taken where the true number may be, on both sides;
where two errors meet in a product, their product counts. A sign, or a selection, that the errors leave undecided is off by the
whole difference, and counted (`Namespace.undecided`).

An operation rounds once; a root or an exponential, which devices have off by a unit, twice.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import PenstockError
from .bounds import SIDES, smallest_normal, unit_roundoff
from .noise import NONE, ONE, SILENT, Input, Noise, Number, Sided, both, plus, times

_TINY = 1e-300  # keeps 0/0 away


class NotCoveredError(PenstockError):
    """A rule does what tracked arrays do not follow; the text says what."""


class Tracked:
    """Float64 numbers with their slopes and noise, as if they were of `Namespace.dtype`."""

    __array_ufunc__ = None  # numpy's numbers leave operations to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, xp: Namespace, value: Number, slopes: dict[Input, Number] | None = None, noise: Noise = SILENT) -> None:
        self.xp, self.slopes, self.noise = xp, slopes or {}, noise
        self.value = value if type(value) is np.ndarray and value.dtype == np.float64 else np.asarray(value, np.float64)

    @property
    def dtype(self) -> np.dtype:
        """Of the arithmetic."""
        return np.dtype(self.xp.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.value.shape

    @property
    def whole(self) -> Noise:
        """All errors as noise."""
        noise = self.noise
        for given, slope in self.slopes.items():
            noise = noise.plus(given.noise.times(slope))
        return noise

    @property
    def most(self) -> Number:
        """The most that the number may be off by, in the worst case."""
        noise = self.whole
        return functools.reduce(plus, (noise.worst.most, noise.linear.most, noise.echo, noise.halves))

    def __add__(self, other: Any) -> Tracked:
        other = self.xp.tracked(other)
        slopes = {**self.slopes}
        for given, slope in other.slopes.items():
            slopes[given] = slopes[given] + slope if given in slopes else slope
        return Tracked(self.xp, self.value + other.value, slopes, self.noise.plus(other.noise)).rounded()

    __radd__ = __add__

    def __neg__(self) -> Tracked:
        return self.scaled(-1.0)

    def __sub__(self, other: Any) -> Tracked:
        return self + -self.xp.tracked(other)

    def __rsub__(self, other: Any) -> Tracked:
        return -self + other

    def __mul__(self, other: Any) -> Tracked:
        return self._product(self.xp.tracked(other)).rounded()

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tracked:
        return self._product(self.xp.tracked(other).reciprocal()).rounded()

    def __rtruediv__(self, other: Any) -> Tracked:
        return self.xp.tracked(other) / self

    def __pow__(self, power: float) -> Tracked:
        if power != 0.5:
            raise NotCoveredError(f"its arithmetic has the power {power}.")
        return self.xp.sqrt(self)

    def __mod__(self, other: int) -> Tracked:
        """Of an exact number, such as that of an update."""
        if not self.exact:
            raise NotCoveredError("its arithmetic has the remainder of a number that is rounded.")
        return Tracked(self.xp, self.value % other)

    def __gt__(self, other: Any) -> Condition:
        return self._compared(other, np.greater)

    def __lt__(self, other: Any) -> Condition:
        return self._compared(other, np.less)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(other, np.equal)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(other, np.not_equal)

    def scaled(self, factor: Number) -> Tracked:
        """The product with a factor that is exact, not rounded."""
        slopes = {given: factor * slope for given, slope in self.slopes.items()}
        return Tracked(self.xp, self.value * factor, slopes, self.noise.times(factor))

    def rounded(self, roundings: float = 1.0) -> Tracked:
        """The result of an operation of the compute dtype."""
        half = np.abs(self.value * unit_roundoff(self.xp.dtype))
        most, noise = roundings * SIDES[self.xp.dtype] * half, self.noise
        halves, squares = plus(noise.halves, most), plus(noise.squares, most * half)
        self.noise = Noise(noise.deviation, noise.worst, noise.linear, noise.echo, halves, squares)
        return self

    @property
    def exact(self) -> bool:
        """Whether there are no errors."""
        return self.noise is SILENT and not self.slopes

    def _product(self, other: Tracked) -> Tracked:
        if other.exact or self.exact:
            return self.scaled(other.value) if other.exact else other.scaled(self.value)
        if self is other:
            slopes, noise = self.scaled(2.0 * self.value).slopes, self.noise.times(2.0 * self.value)
        else:
            one, two = self.scaled(other.value), other.scaled(self.value)
            slopes, noise = one.slopes, one.noise.plus(two.noise)
            for given, slope in two.slopes.items():
                slopes[given] = slopes[given] + slope if given in slopes else slope
        errors = [each.whole for each in (self, other)]
        fixed = [plus(each.linear.most, each.halves) for each in errors]
        if not any(each is NONE for each in fixed):
            noise = noise.plus(Noise(linear=both(fixed[0] * fixed[1])))
        if not all(each.echo is NONE for each in errors):
            reach = [plus(each, of.echo) for each, of in zip(fixed, errors, strict=True)]
            noise = noise.plus(Noise(echo=reach[0] * reach[1] - fixed[0] * fixed[1]))
        return Tracked(self.xp, self.value * other.value, slopes, noise)

    def reciprocal(self) -> Tracked:
        """1/x, not rounded."""
        if (self.value < 0.0).any():
            signs = np.where(self.value < 0.0, -1.0, 1.0)
            return self.scaled(signs).reciprocal().scaled(signs)

        def beyond(error: Sided) -> Sided:
            low = np.maximum(self.value - error.below, _TINY)
            return Sided(error.above / (self.value + error.above) / self.value, error.below / low / self.value)

        return self.through(1.0 / self.value, beyond, 1.0 / self.value**2, roundings=0.0)

    def through(self, value: Number, beyond: Any, slope: Number, *, roundings: float) -> Tracked:
        """What a monotone function makes of this.

        Args:
            value: of the function.
            beyond: from how far its argument may be off to how far its value is off then.
            slope: the absolute value of the derivative, for what is random and small.
            roundings: of the result.
        """
        noise = self.whole
        if noise is SILENT:
            return Tracked(self.xp, value).rounded(roundings) if roundings else Tracked(self.xp, value)
        linear = beyond(noise.linear)
        worst = beyond(noise.linear.plus(noise.worst))
        spread = Sided(worst.below - linear.below, worst.above - linear.above)
        echo = NONE if noise.echo is NONE else slope * noise.echo
        made = Noise(
            times(slope, noise.deviation), spread, linear, echo, times(slope, noise.halves), times(slope**2, noise.squares)
        )
        return Tracked(self.xp, value, {}, made).rounded(roundings) if roundings else Tracked(self.xp, value, {}, made)

    def _compared(self, other: Any, relation: Any) -> Condition:
        other = self.xp.tracked(other)
        off = plus(self.most, other.most)
        return Condition(relation(self.value, other.value), (off == 0.0) | (np.abs(self.value - other.value) > off))


class Condition(NamedTuple):
    """A comparison, and whether no error of its sides can change it."""

    value: np.ndarray
    sure: np.ndarray


class Namespace:
    """The array namespace of `Tracked`: what the rules of `core` use of one. Anything else is `NotCoveredError`.

    dtype: of the arithmetic that is followed: "float32" or "float64". undecided: how many elements of signs and of selections
    were left open by the errors, so far. discrete: whether there was a sign, of which results are few numbers.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype, self.unit = dtype, SIDES[dtype] * unit_roundoff(dtype)
        self.undecided, self.discrete = 0, False

    def __getattr__(self, name: str) -> Any:
        raise NotCoveredError(f"its arithmetic calls {name}, which is not followed element by element.")

    def tracked(self, x: Any) -> Tracked:
        """A number or an array without an error; what is tracked already stays what it is."""
        return x if isinstance(x, Tracked) else Tracked(self, x)

    def given(self, value: Number, errors: Input) -> Tracked:
        """An input."""
        return Tracked(self, value, {errors: ONE})

    def stored(self, x: Any) -> Tracked:
        """A scalar as arithmetic gets it: it is off by what computing it has rounded, or at least by its own rounding."""
        x = self.tracked(x)
        own = 0.0 if x.value.astype(self.dtype) == x.value else self.unit * np.abs(x.value)
        return Tracked(self, x.value, {}, Noise(linear=both(np.maximum(x.most, own))))

    def finfo(self, dtype: np.dtype) -> np.finfo:
        """Of the dtype of the arithmetic."""
        return np.finfo(dtype)

    def sqrt(self, x: Tracked) -> Tracked:
        """The root, which devices have off by a unit: two roundings."""
        root = np.sqrt(x.value)

        def beyond(error: Sided) -> Sided:  # without the differences of nearly equal roots; an error is never zero
            low = np.sqrt(np.maximum(x.value - error.below, 0.0))
            below = np.minimum(error.below, x.value) / (root + low + _TINY)
            return Sided(below, error.above / (root + np.sqrt(x.value + error.above) + _TINY))

        slope = 0.5 / np.maximum(root, max(smallest_normal(self.dtype), 1e-150))  # whose square is finite
        return x.through(root, beyond, slope, roundings=2.0)

    def log(self, x: Tracked) -> Tracked:
        """The logarithm."""
        return self._monotone(x, np.log, 1.0 / np.abs(x.value), 1.0)

    def exp(self, x: Tracked) -> Tracked:
        """The exponential, two roundings."""
        return self._monotone(x, np.exp, np.exp(x.value), 2.0)

    def expm1(self, x: Tracked) -> Tracked:
        """exp(x) - 1, two roundings."""
        return self._monotone(x, np.expm1, np.exp(x.value), 2.0)

    def _monotone(self, x: Tracked, function: Any, slope: Number, roundings: float) -> Tracked:
        value = function(x.value)

        def beyond(error: Sided) -> Sided:
            return Sided(value - function(x.value - error.below), function(x.value + error.above) - value)

        return x.through(value, beyond, slope, roundings=roundings)

    def clip(self, x: Tracked, low: float | None, high: float | None) -> Tracked:
        """Limit the values; where none is beyond, nothing changes."""
        value = np.clip(x.value, low, high)
        return x if np.array_equal(value, x.value) else Tracked(self, value, {}, x.whole)

    def where(self, condition: Any, x: Any, y: Any) -> Tracked:
        """Select; where the condition is left open by errors, the result is off by the difference of both."""
        chosen, sure = condition if isinstance(condition, Condition) else (np.asarray(condition), np.asarray(True))
        x, y = self.tracked(x), self.tracked(y)
        if sure.all() and (chosen.all() or not chosen.any()):
            return x if chosen.all() else y
        kinds = zip(x.whole.times(1.0), y.whole.times(1.0), strict=True)
        noise = Noise(*(_chosen(chosen, one, other) for one, other in kinds))
        if not sure.all():
            self.undecided += int(np.sum(~sure))
            off = np.abs(x.value - y.value) + x.most + y.most
            noise = noise.plus(Noise(linear=both(np.where(sure, 0.0, off))))
        return Tracked(self, np.where(chosen, x.value, y.value), {}, noise)

    def sign(self, x: Tracked) -> Tracked:
        """An undecided sign is off by 2, or by 1 where it is 0."""
        self.discrete = True
        value, off = np.sign(x.value), x.most
        undecided = (np.abs(x.value) <= off) & (off > 0.0)
        self.undecided += int(np.sum(undecided))
        return Tracked(self, value, {}, Noise(linear=both(np.where(undecided, 1.0 + np.abs(value), 0.0))))

    def abs(self, x: Tracked) -> Tracked:
        """The magnitude."""
        return Tracked(self, np.abs(x.value), {}, x.whole)

    def isnan(self, x: Tracked) -> np.ndarray:
        """Whether values are NaN."""
        return np.isnan(x.value)

    def zeros_like(self, x: Any) -> Tracked:
        """Exact zeros."""
        return Tracked(self, np.zeros_like(self.tracked(x).value))

    def ones_like(self, x: Any) -> Tracked:
        """Exact ones."""
        return Tracked(self, np.ones_like(self.tracked(x).value))


def _chosen(chosen: np.ndarray, one: Any, other: Any) -> Any:
    if isinstance(one, Sided):
        return Sided(*(_chosen(chosen, *each) for each in zip(one, other, strict=True)))
    return NONE if one is NONE and other is NONE else np.where(chosen, one, other)
