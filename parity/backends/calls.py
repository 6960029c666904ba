"""Calls into a backend, which may be the user's own: an error, or a wrong result, is reported with the name of the method.

A backend that cannot say what it runs ends the suite (`BrokenBackendError`): its cases could be neither run nor left out. One
that fails at a case has a failed row there, and the suite goes on.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ...core.dtypes import PARAMETER_DTYPES
from ...core.errors import InvalidArgumentError
from ...core.rules import Rule
from ..cases import Case, Problem
from .protocol import ABILITIES, Backend, Held

FAILURES = (Exception, SystemExit)
"""What a call into a backend may raise and a row can tell: sys.exit() too, which must not end the suite as a success."""


class BrokenBackendError(InvalidArgumentError):
    """A backend describes itself wrongly."""


class FailedRunError(Exception):
    """A run failed; the text names the method and the error."""


def described(error: BaseException) -> str:
    """Return an exception as one line of text."""
    text = str(error) if isinstance(error, FailedRunError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def check_description(backend: Any) -> None:
    """Raise unless an object has the attributes and methods of a backend.

    Raises:
        InvalidArgumentError: it has not.
    """
    if isinstance(backend, type):
        raise InvalidArgumentError(f"backend={backend.__name__} is a class; register an instance of it.")
    missing = [name for name in ("name", "unavailable", "refuses", "start") if not hasattr(backend, name)]
    if missing:
        raise InvalidArgumentError(f"backend={backend!r} has no {' and no '.join(missing)}; see `penstock.parity.Backend`.")
    if not isinstance(backend.name, str) or not backend.name:
        raise InvalidArgumentError(
            f"name={backend.name!r} of a backend must be what --backend takes: a string that is not empty."
        )
    abilities = getattr(backend, "abilities", ())
    if isinstance(abilities, str) or not isinstance(abilities, Collection) or not set(abilities) <= set(ABILITIES):
        raise InvalidArgumentError(f"abilities={abilities!r} of backend {backend.name!r} must be some of {list(ABILITIES)}.")
    added = getattr(backend, "norm_eps", 0.0)
    if not isinstance(added, numbers.Real) or not 0.0 <= float(added) < np.inf:
        raise InvalidArgumentError(f"norm_eps={added!r} of backend {backend.name!r} must be a number in [0, inf).")


def reason(backend: Any, method: str, *case: Any) -> str | None:
    """Call `unavailable` or a `refuses...` method of a backend, and check that it returns a sentence or None.

    Raises:
        BrokenBackendError: it raises, or returns something else.
    """
    where = f"backend={backend.name!r}: {method}()"
    try:
        answer = getattr(backend, method)(*case)
    except FAILURES as error:
        raise BrokenBackendError(f"{where} raised {described(error)}; it must return a sentence, or None.") from error
    if answer is not None and not (isinstance(answer, str) and answer.strip()):
        raise BrokenBackendError(f"{where} returned {answer!r}; it must return a sentence, or None.")
    return answer


def held_after(backend: Backend, case: Case, steps: Collection[int]) -> Iterator[tuple[int, Mapping[str, Held]]]:
    """Yield what a new run of a case holds after each of the numbers of updates.

    Raises:
        FailedRunError: a method raised, or returned what it must not.
    """
    at = "start()"
    try:
        running = backend.start(case)
        for step in range(1, max(steps) + 1):
            at = f"step() number {step}"
            running.step(case.problem.gradients(step))
            if step in steps:
                at = f"held() after step {step}"
                yield step, checked(case.problem, running.held())
    except FAILURES as error:
        raise FailedRunError(f"{at}: {described(error)}") from error


def checked(problem: Problem, held: Any) -> Mapping[str, Held]:
    """Return the result of `held()`; raise if it is not as it must be.

    Raises:
        InvalidArgumentError: a tensor is missing, or an array is none of numpy's, or not of its shape, or a parameter not in
            the problem's dtype, or a moment in no dtype of parameters.
    """
    if not isinstance(held, Mapping):
        raise InvalidArgumentError(f"held() returned {type(held).__name__}; it must return a mapping of names to `Held`.")
    if held.keys() != problem.setting.shapes.keys():
        raise InvalidArgumentError(f"held() has the tensors {sorted(held)}; it must have {sorted(problem.setting.shapes)}.")
    for name, shape in problem.setting.shapes.items():
        if not isinstance(held[name], Held):
            raise InvalidArgumentError(f"held() has {type(held[name]).__name__} for {name!r}; it must have a `Held`.")
        for field, array in {"parameter": held[name].parameter, **held[name].arrays()}.items():
            _check_array(f"{field} of {name!r}", array, shape)
        dtype = held[name].parameter.dtype.name
        if dtype != problem.dtype:
            raise InvalidArgumentError(f"parameter of {name!r} has become {dtype}; it must stay {problem.dtype}.")
        _check_fields(problem.rule, name, held[name])
    return held


def _check_array(what: str, array: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray | np.generic):  # numpy makes scalars of 0-d arrays by itself
        raise InvalidArgumentError(f"{what} is {type(array).__name__}; it must be a numpy array.")
    if array.shape != shape:
        raise InvalidArgumentError(f"{what} has the shape {list(array.shape)}; it must have {list(shape)}.")


def _check_fields(rule: Rule, name: str, held: Held) -> None:
    own = held.parameter.dtype.name
    known: dict[str, tuple[str, ...]] = {field.name: PARAMETER_DTYPES for field in rule.fields}
    known |= {"parameter": (own,), "compensation": ("int16", own) if own == "bfloat16" else (own,)}
    for field, array in held.arrays().items():
        if field not in known:
            raise InvalidArgumentError(f"held() has {field!r} of {name!r}; {rule.name} has {', '.join(known)}.")
        if array.dtype.name not in known[field]:
            raise InvalidArgumentError(
                f"{field} of {name!r} is {array.dtype.name}; it must be one of {', '.join(known[field])}."
            )
