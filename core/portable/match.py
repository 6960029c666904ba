"""Checks that a portable state fits an optimizer, and converts its arrays to that optimizer's dtypes.

Everything is checked before anything is returned: a frontend that puts the arrays in place afterwards changes all or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import numpy as np

from ..array_ops import numpy_dtype
from ..codings import EIGHT_BIT
from ..codings.eight_bit import scale_shape
from ..compensation import compensation_dtype
from ..errors import InvalidArgumentError
from ..rules import Rule
from .rename import is_square
from .state import ParameterState, PortableState, listed, may_have_random_keys, scale_name

WIDER = {
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
"""The dtypes that hold every number of a dtype exactly."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """The arrays that an optimizer keeps for one parameter.

    Args:
        rule: by which it is updated.
        dtype, shape: of the parameter.
        compensated: resolved, of `core.compensation`.
        fields: dtypes of the rule's fields by name, as `core.codings.state_dtypes` has them; None where the caller rounds them
            himself.
        layered: whether the leading axis is one of layers.
        may_be_float32: fields that stay float32 where the state has them so: means of squares whose dtype follows from beta2,
            which may have been higher when they were made.
    """

    rule: Rule
    dtype: str
    shape: tuple[int, ...]
    compensated: str
    fields: Mapping[str, str | None]
    layered: bool = False
    may_be_float32: Collection[str] = ()

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales of a field in 8 bits."""
        return (self.shape[0], *scale_shape(self.shape[1:])) if self.layered else scale_shape(self.shape)


def matched(
    state: PortableState,
    expected: Mapping[str, Expected],
    *,
    parameters: bool,
    arguments: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, ParameterState]:
    """Return the parameters of a state with arrays in the optimizer's dtypes.

    Moments of a lower dtype are upcast and codes decoded, which is exact; a parameter that was not compensated and now is
    begins with k = 0, which is exact, too. Nothing else is converted.

    Args:
        state: renamed already.
        expected: what the optimizer keeps, by name.
        parameters: whether the parameters themselves are wanted.
        arguments: how the optimizer calls the dtypes of its fields, by field, for the errors; "state_dtype" where not given.

    Raises:
        InvalidArgumentError: it is another optimizer's or model's, or it would lose digits; the text names the remedy.
    """
    check_rules(state, {name: one.rule for name, one in expected.items()})
    if parameters and not state.holds_parameters:
        raise InvalidArgumentError(
            "parameters=True needs a file that holds the parameters, and this one does not; export it with parameters=True, or "
            "load the model's own checkpoint."
        )
    return {name: _matched(name, state.parameters[name], expected[name], arguments) for name in expected}


def check_rules(state: PortableState, rules: Mapping[str, Rule]) -> None:
    """Raise `InvalidArgumentError` unless a state has the optimizer's parameters, each of the rule by which that updates it.

    Args:
        state: renamed already.
        rules: of the optimizer, by name of the parameter.
    """
    _check_names(state.parameters, rules)
    for name, own in rules.items():
        if (rule := state.rules[name]) is not own:
            others = sorted(other for other in rules if (state.rules[other], rules[other]) == (rule, own))
            declare = f"declare the moments to be this one's with: penstock convert --rule {own.name}"
            raise InvalidArgumentError(
                f"the state of {listed(others, 2)} is of the rule {rule.name!r}, and the optimizer's is {own.name!r}; give "
                f"{'it' if len(others) == 1 else 'them'} {rule.name!r} as the exporting optimizer did, or "
                f"{declare if rule.fields == own.fields else 'start afresh, as the two keep different fields'}."
            )


def check_own(
    name: str, entry: ParameterState, holds: Callable[[np.ndarray], bool], *, parameters: bool, layered: bool = False
) -> None:
    """Raise `InvalidArgumentError` if the optimizer's own parameter shows that the state does not belong to it.

    That can be seen where the file holds the parameters, too: a square matrix that is transposed, and a compensation of
    another parameter than the one it would be used for.

    Args:
        name: of the parameter.
        entry: of the state, renamed.
        holds: whether the optimizer's parameter is equal to an array.
        parameters: whether the parameter itself comes from the state, too.
        layered: whether the leading axis is one of layers.
    """
    compared = entry.compensation is not None and not parameters
    square = is_square(entry.shape[layered:])
    if entry.parameter is None or not (compared or square) or holds(entry.parameter):
        return
    first = (0,) if layered else ()
    if square and holds(entry.parameter.transpose(*first, *reversed(range(len(first), len(entry.shape))))):
        raise InvalidArgumentError(
            f"parameter {name!r} is transposed in the state: only transposed are its values the model's. Say it with "
            "names=: Transposed(NAME)."
        )
    if compared:
        raise InvalidArgumentError(
            f"parameter {name!r} is not that of the state, whose compensation holds the lost digits of just those values; "
            "import with parameters=True, or load the model's checkpoint of the same moment first."
        )


def _check_names(found: Collection[str], expected: Collection[str]) -> None:
    faults = []
    for names, fault in (
        (set(expected) - set(found), "lacks"),
        (set(found) - set(expected), "has, and the optimizer has not,"),
    ):
        if names:
            faults.append(f"{fault} {listed(sorted(names))}")
    if faults:
        raise InvalidArgumentError(
            f"the state {'; it '.join(faults)}; give names= to say how the parameters are called in the file."
        )


def _matched(name: str, entry: ParameterState, expected: Expected, arguments: Mapping[str, str]) -> ParameterState:
    if entry.shape != expected.shape:
        raise InvalidArgumentError(
            f"parameter {name!r} has shape {entry.shape} in the state and {expected.shape} in the model; if it is transposed, "
            "or stacked, say so with names=."
        )
    if entry.dtype != expected.dtype:
        raise InvalidArgumentError(
            f"parameter {name!r} is {entry.dtype} in the state and {expected.dtype} in the model; make the model {entry.dtype}."
        )
    fields: dict[str, np.ndarray] = {}
    for field, dtype in expected.fields.items():
        fields |= _widened(name, field, entry, dtype, arguments.get(field, "state_dtype"), expected)
    random = may_have_random_keys(expected.rule, expected.compensated, expected.fields)
    return dataclasses.replace(
        entry,
        fields=fields,
        compensated=expected.compensated,
        compensation=_compensation(name, entry, expected.compensated),
        random_keys=entry.random_keys if random else (),
    )


def _widened(
    name: str, field: str, entry: ParameterState, dtype: str | None, argument: str, expected: Expected
) -> dict[str, np.ndarray]:
    """Return a field in this dtype, under its name, and with its scales where it is of codes."""
    scale = scale_name(field)
    if dtype == EIGHT_BIT and scale in entry.fields:
        if entry.fields[scale].shape != expected.scale_shape:
            raise InvalidArgumentError(
                f"{scale} of {name!r} has shape {entry.fields[scale].shape} in the state and {expected.scale_shape} in the "
                "optimizer: here it is a stack of layers and there it is not, or the other way round; split it with names=."
            )
        return {field: entry.fields[field], scale: entry.fields[scale]}
    array = entry.decoded(field)
    there = array.dtype.name
    if dtype is None or dtype == there or (there == "float32" and field in expected.may_be_float32):
        return {field: array}
    if dtype not in WIDER[there]:
        encode = ", or encode the state with: penstock convert --encode" if dtype == EIGHT_BIT else ""
        raise InvalidArgumentError(
            f"{field} of {name!r} is {there} in the state, and the optimizer keeps it in {dtype}, which would round it; "
            f"construct the optimizer with {argument}={there}{encode}."
        )
    return {field: array.astype(numpy_dtype(dtype))}


def _compensation(name: str, entry: ParameterState, compensated: str) -> np.ndarray | None:
    if entry.compensated == compensated:
        return entry.compensation
    if entry.compensation is not None:
        raise InvalidArgumentError(
            f"parameter {name!r} is compensated by {entry.compensated!r} in the state and by {compensated!r} in the optimizer; "
            f"construct that with compensation={entry.compensated!r} where it takes it, or drop the lost digits for good with: "
            "penstock convert --drop-compensation."
        )
    kept = compensation_dtype(compensated, entry.dtype)
    return None if kept is None else np.zeros(entry.shape, numpy_dtype(kept))
