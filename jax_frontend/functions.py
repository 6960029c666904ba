"""Checks of the functions that a user gives."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.errors import InvalidArgumentError


def check_takes(name: str, function: Any, parameters: str) -> None:
    """Check that a function can be called with some positional arguments; one that does not tell is taken as it is.

    Args:
        name: of the argument, for the error.
        function: what was given.
        parameters: names of the positional arguments, as in "outer, batch".

    Raises:
        InvalidArgumentError: it is not callable, or takes others.
    """
    if not callable(function):
        raise InvalidArgumentError(f"{name}={function!r} is not callable.")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError as error:
        taken = ", ".join(map(str, signature.parameters))
        raise InvalidArgumentError(
            f"{name} is called with ({parameters}), and {name}={function!r} takes ({taken}): {error}."
        ) from None
