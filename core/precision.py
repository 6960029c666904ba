"""Presets of what is kept for each parameter: how exact a training state is, and how small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .codings import EIGHT_BIT
from .errors import InvalidArgumentError


class Precision(NamedTuple):
    """A preset.

    compensation: of low-precision parameters, one of `core.compensation.COMPENSATIONS`.
    state_dtype: of every field of the rule but those that need the parameter's precision; None: that of the parameter, or
        float32 where that is too low.
    """

    compensation: str
    state_dtype: str | None


PRECISIONS = {
    "exact": Precision("auto", None),
    "compact": Precision("auto8", EIGHT_BIT),
    "smallest": Precision("stochastic", EIGHT_BIT),
}


def name_of(compensation: Any, state_dtype: Any) -> str | None:
    """Return the name of the preset that chooses these, or None."""
    return next((name for name, preset in PRECISIONS.items() if preset == (compensation, state_dtype)), None)


def chosen(precision: Any, given: Mapping[Any, Any]) -> Precision:
    """Return a preset.

    Args:
        precision: its name.
        given: those of the arguments that a preset chooses that the user gave, by their names in the frontend.

    Raises:
        InvalidArgumentError: the name is not known; a preset other than "exact", the default, together with one of `given`.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InvalidArgumentError(f"precision={precision!r} is not known; it must be one of {', '.join(PRECISIONS)}.")
    if precision != "exact" and given:
        both = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InvalidArgumentError(
            f"precision={precision!r} chooses {', '.join(given)} itself, and {both} was given; leave out one or the other."
        )
    return PRECISIONS[precision]
