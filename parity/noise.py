"""What a number may be off by: errors to either side, and of several kinds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Number = Any
"""A float, or an array with one for each element."""

NONE = float("0")
"""No error at all, recognised by its identity, so that nothing is computed with it."""

ONE = float("1")
"""The slope of an input, recognised like `NONE`."""


def plus(x: Number, y: Number) -> Number:
    """The sum of two errors, of which each may be none."""
    return y if x is NONE else x if y is NONE else x + y


def times(factor: Number, x: Number) -> Number:
    """An error times a factor."""
    return NONE if x is NONE else factor * x


class Sided(NamedTuple):
    """How far the true number may be below, and above."""

    below: Number = NONE
    above: Number = NONE

    @property
    def most(self) -> Number:
        """To either side."""
        return self.below if self.below is self.above else np.maximum(self.below, self.above)

    def plus(self, other: Sided) -> Sided:
        """The sum of both."""
        below = plus(self.below, other.below)
        symmetric = self.below is self.above and other.below is other.above
        return Sided(below, below if symmetric else plus(self.above, other.above))

    def times(self, factor: Number) -> Sided:
        """That of the number times a factor, which a negative one turns round."""
        size = np.abs(factor)
        below = times(size, self.below)
        if self.below is self.above:
            return Sided(below, below)
        above = times(size, self.above)
        return Sided(np.where(factor < 0, above, below), np.where(factor < 0, below, above))


def both(x: Number) -> Sided:
    """The same on both sides."""
    return Sided(x, x)


class Noise(NamedTuple):
    """Errors by kind, as in `bounds.RoundingErrors`; `halves` and `squares` are of what the operations round."""

    deviation: Number = NONE
    worst: Sided = both(NONE)
    linear: Sided = both(NONE)
    echo: Number = NONE
    halves: Number = NONE
    squares: Number = NONE

    def plus(self, other: Noise) -> Noise:
        """The sum of both."""
        return Noise(
            plus(self.deviation, other.deviation),
            self.worst.plus(other.worst),
            self.linear.plus(other.linear),
            plus(self.echo, other.echo),
            plus(self.halves, other.halves),
            plus(self.squares, other.squares),
        )

    def times(self, factor: Number) -> Noise:
        """That of the number times a factor."""
        if self is SILENT or factor is ONE:
            return self
        size = np.abs(factor)
        return Noise(
            times(size, self.deviation),
            self.worst.times(factor),
            self.linear.times(factor),
            times(size, self.echo),
            times(size, self.halves),
            times(size**2, self.squares),
        )


SILENT = Noise()


class Input:
    """Something that comes into a computation with errors, of the kinds of `bounds.RoundingErrors`."""

    def __init__(self, deviation: Number = NONE, worst: Number = NONE, linear: Number = NONE, echo: Number = NONE) -> None:
        self.noise = Noise(deviation, both(worst), both(linear), echo)
