r"""Portable state: everything that a run needs to continue, as named numpy arrays that both frameworks read.

Every parameter has an entry of its own, whatever the framework's grouping or stacking of them:

    exp_avg and so on     the fields of its rule (debiased where the rule keeps them so), in the dtype in which they are kept;
                          int8 or uint8 codes of 8 bits have their scales beside them, exp_avg_scale and so on
    compensation          the bits that a low-precision parameter cannot hold, or None
    random_keys           the keys of its random bits (`core.random_bits`) where something is rounded stochastically
    step                  the number of updates applied to it
    parameter             the parameter itself, or None where the state was exported without

The header says by groups of which rule the fields are, and the hyperparameters as they were; a stacked layer is one entry a
layer. There are no Python objects in it: a file of it (`core.portable.file`) can be read without executing anything.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..array_ops import numpy_ops
from ..codings import EIGHT_BIT, EightBit
from ..codings.eight_bit import decoded, scale_shape
from ..compensation import WITH_RANDOM_BITS, compensation_dtype, resolve
from ..dtypes import PARAMETER_DTYPES, check_parameter_dtype
from ..errors import InvalidArgumentError
from ..hyperparameters import DECAY, check_number
from ..random_bits import WORD
from ..rules import RULES, Rule, check_rule

BESIDES = ("compensation", "parameter")
"""The arrays of a `ParameterState` beside the fields of its rule; all have the parameter's shape."""


CODES = ("int8", "uint8")
"""The dtypes of codes of 8 bits (`core.codings.eight_bit`)."""


def scale_name(field: str) -> str:
    """Return the name of the scales of a field whose array is codes."""
    return f"{field}_scale"


CONSTANTS = {name: constant for rule in RULES.values() for name, constant in rule.hyperparameters.CONSTANTS.items()}
"""Of all rules, the settings that are not numbers of the arithmetic."""

Setting = float | bool | str | Sequence[float] | None
Settings = Mapping[str, Setting]


def array_names(rule: Rule) -> tuple[str, ...]:
    """Return the names of the arrays that a parameter of this rule may have."""
    scales = [scale_name(field.name) for field in rule.fields if not field.is_precise]
    return (*(field.name for field in rule.fields), *scales, *BESIDES)


def may_have_random_keys(rule: Rule, compensated: str, dtypes: Mapping[str, str | None]) -> bool:
    """Whether something of a parameter may be rounded stochastically. dtypes: of its arrays."""
    squares = [dtypes.get(field.name) for field in rule.fields if field.of_squares]
    return compensated in WITH_RANDOM_BITS or any(dtype in ("bfloat16", "uint8", EIGHT_BIT) for dtype in squares)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names for an error: the first few, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dtypes and shapes of a parameter and of its arrays, which are checked before an array is read.

    Args:
        dtype: of the parameter, one of `core.dtypes.PARAMETER_DTYPES`.
        shape: of the parameter.
        compensated: resolved, of `core.compensation`.
        arrays: dtype and shape of those of `array_names` that there are.
        random_keys: as in `ParameterState`.
    """

    dtype: str
    shape: tuple[int, ...]
    compensated: str
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    random_keys: tuple[int, ...] = ()

    def check(self, name: str, rule: Rule) -> None:
        """Raise `InvalidArgumentError` or `UnsupportedTensorError` unless they can be those of a parameter called `name`."""
        check_parameter_dtype(self.dtype, f"parameter {name!r}")
        if self.compensated.startswith("auto") or resolve(self.compensated, self.dtype) != self.compensated:
            raise InvalidArgumentError(f"the compensation of parameter {name!r}, {self.dtype}, cannot be {self.compensated!r}.")
        count = len(self.random_keys)
        random = may_have_random_keys(rule, self.compensated, {array: dtype for array, (dtype, _) in self.arrays.items()})
        if (count and not random) or count not in (0, 1, *self.shape[:1]):
            raise InvalidArgumentError(
                f"parameter {name!r}, {self.compensated!r} of shape {self.shape}, has {count} random_keys; one that is rounded "
                "stochastically has one, or one for each layer of its leading axis."
            )
        for key in self.random_keys:
            if type(key) is not int or not 0 <= key <= WORD:
                raise InvalidArgumentError(f"a random key of parameter {name!r} is {key!r}; it must be an int in [0, 2**32).")
        compensation = compensation_dtype(self.compensated, self.dtype)
        if ("compensation" in self.arrays) != (compensation is not None):
            there = "has one" if "compensation" in self.arrays else "has none"
            raise InvalidArgumentError(
                f"the compensation of parameter {name!r} is {self.compensated!r}, but as an array it {there}."
            )
        possible: dict[str, tuple[str | None, ...]] = {"compensation": (compensation,), "parameter": (self.dtype,)}
        for field in rule.fields:
            if field.name not in self.arrays:
                raise InvalidArgumentError(f"parameter {name!r} has no {field.name}.")
            possible[field.name] = (*PARAMETER_DTYPES, *(() if field.is_precise else (CODES[field.of_squares],)))
            dtype, scale = self.arrays[field.name][0], scale_name(field.name)
            coded = dtype in CODES
            if coded != (scale in self.arrays):
                raise InvalidArgumentError(
                    f"{field.name} of {name!r} is {dtype} {'without' if coded else 'with'} {scale}; codes of 8 bits have one, "
                    "and nothing else has."
                )
            if coded:
                possible[scale] = ("float32",)
        scales = {scale_name(field.name) for field in rule.fields}
        if odd := sorted(self.arrays.keys() - possible.keys()):
            raise InvalidArgumentError(f"parameter {name!r} has {listed(odd)}, which {rule.name} does not keep.")
        for array, (dtype, shape) in self.arrays.items():
            if shape not in (self._scale_shapes() if array in scales else [self.shape]):
                raise InvalidArgumentError(f"{array} of {name!r} has shape {shape}, the parameter has {self.shape}.")
            if dtype not in possible[array]:
                allowed = " or ".join(str(one) for one in possible[array])
                raise InvalidArgumentError(f"{array} of {name!r} has dtype {dtype}; it must be {allowed}.")

    def _scale_shapes(self) -> list[tuple[int, ...]]:
        """The shapes that scales can have: of a matrix, and of a stack of layers, each a matrix."""
        layered = [(self.shape[0], *scale_shape(self.shape[1:]))] if len(self.shape) > 2 else []
        return [*([scale_shape(self.shape)] if len(self.shape) > 1 else []), *layered]


@dataclasses.dataclass(frozen=True)
class ParameterState:
    """One parameter and its optimizer state.

    Args:
        dtype: of the parameter, one of `core.dtypes.PARAMETER_DTYPES`.
        shape: of the parameter.
        compensated: what `compensation` is: resolved, of `core.compensation`.
        step: updates so far, from 0 on.
        fields: those of its rule by name, floating-point arrays or codes of the shape; and the scales of codes (`scale_name`).
        compensation: int16 (split), int8 (split8) or `dtype` (kahan), or None.
        parameter: in `dtype`, or None where the parameters are kept elsewhere.
        random_keys: one, or one for each layer of a stack, where something is rounded stochastically; none before the first
            update.
    """

    dtype: str
    shape: tuple[int, ...]
    compensated: str
    step: int
    fields: Mapping[str, np.ndarray]
    compensation: np.ndarray | None = None
    parameter: np.ndarray | None = None
    random_keys: tuple[int, ...] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that exist, by name (`array_names`)."""
        besides = {name: array for name in BESIDES if (array := getattr(self, name)) is not None}
        return {**self.fields, **besides}

    def with_arrays(self, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> ParameterState:
        """Return it with other arrays, of this shape, under the names of `arrays()`."""
        fields = {name: array for name, array in arrays.items() if name not in BESIDES}
        besides: dict[str, Any] = {name: arrays.get(name) for name in BESIDES}
        return dataclasses.replace(self, shape=shape, fields=fields, **besides)

    def decoded(self, field: str) -> np.ndarray:
        """Return a field as numbers: codes of 8 bits as float32, other arrays as they are."""
        codes, scale = self.fields[field], self.fields.get(scale_name(field))
        if scale is None:
            return codes
        layered = len(scale.shape) == 3
        pairs = zip(codes, scale, strict=True) if layered else [(codes, scale)]
        numbers = [decoded(numpy_ops, EightBit(*pair)) for pair in pairs]
        return np.stack(numbers) if layered else numbers[0]

    def check(self, name: str, rule: Rule) -> None:
        """Raise `InvalidArgumentError` unless shapes, dtypes and numbers can be those of a parameter called `name`."""
        layouts = {field: (array.dtype.name, array.shape) for field, array in self.arrays().items()}
        Layout(self.dtype, self.shape, self.compensated, layouts, self.random_keys).check(name, rule)
        if not isinstance(self.step, int) or not 0 <= self.step < 2**63:
            raise InvalidArgumentError(f"step of parameter {name!r} is {self.step}; it must be an int, 0 or more.")
        for kind, array in self.arrays().items():
            if array.dtype.kind not in "iu" and not np.isfinite(array).all():
                raise InvalidArgumentError(f"{kind} of {name!r} holds an infinity or a NaN: no run can go on from there.")
        for field in rule.fields:
            scale = self.fields.get(scale_name(field.name))
            if field.of_squares and (np.asarray(self.fields[field.name]) < 0).any():
                raise InvalidArgumentError(f"{field.name} of {name!r} holds a negative number; a mean of squares has none.")
            if scale is not None and (scale < 0).any():
                raise InvalidArgumentError(f"{scale_name(field.name)} of {name!r} holds a negative number; a scale is none.")


@dataclasses.dataclass(frozen=True)
class PortableGroup:
    """Parameters that share a rule and hyperparameters.

    Args:
        rule: a name in `core.rules.RULES`.
        hyperparameters: by the names of `core.hyperparameters.Hyperparameters`, as they were; those that the frontend could not
            know (inside of a chain of transforms, on a device) are left out. For information: an import does not change a
            schedule.
        parameters: their names.
    """

    rule: str
    hyperparameters: Settings
    parameters: tuple[str, ...]

    def check(self, number: int) -> None:
        """Raise `InvalidArgumentError` for an unknown rule, a number that a float cannot hold, or a beta out of range."""
        check_rule(self.rule)
        for name, value in self.hyperparameters.items():
            if (constant := CONSTANTS.get(name)) is not None:
                if not constant.allows(tuple(value) if isinstance(value, list) else value):
                    raise InvalidArgumentError(f"{name!r} of group {number} is {value!r}; it must be {constant.described}.")
                continue
            if value is not None and not isinstance(value, (bool, int, float)):
                raise InvalidArgumentError(f"{name!r} of group {number} is {value!r}; it must be a number.")
            if value is not None and not abs(value) <= sys.float_info.max:  # NaN is not <= anything
                raise InvalidArgumentError(
                    f"{name!r} of group {number} is not finite; it must be a number that a float can hold."
                )
        for name in filter(None, {field.beta for field in RULES[self.rule].fields}):
            if (beta := self.hyperparameters.get(name)) is not None:  # by whose bias an import divides
                check_number(f"group {number}: {name}", beta, DECAY)


def rules_of(groups: Iterable[PortableGroup]) -> dict[str, Rule]:
    """Return the rule of each parameter of some groups, by name."""
    return {name: RULES[group.rule] for group in groups for name in group.parameters}


def names_of_rules(groups: Iterable[PortableGroup]) -> str:
    """Return the rules of some groups, to be printed: "rule adamw", "rules adamw, muon"."""
    names = sorted({group.rule for group in groups})
    return f"rule{'s' if len(names) > 1 else ''} {', '.join(names) or 'unknown'}"


def check_groups(groups: Sequence[PortableGroup], names: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` unless every parameter is in exactly one group."""
    for number, group in enumerate(groups):
        group.check(number)
    grouped = Counter(name for group in groups for name in group.parameters)
    there = set(names)
    odd = sorted(name for name in {*grouped, *there} if grouped[name] != (name in there))
    if odd:
        raise InvalidArgumentError(f"every parameter must be in one group; this is not so for {listed(odd)}.")


@dataclasses.dataclass(frozen=True)
class PortableState:
    """The state of one optimizer; it is validated when it is constructed.

    Args:
        groups: every parameter is in exactly one.
        parameters: by name.

    Raises:
        InvalidArgumentError, UnsupportedTensorError: it cannot be the state of such an optimizer; the text names the parameter.
    """

    groups: tuple[PortableGroup, ...]
    parameters: Mapping[str, ParameterState]

    def __post_init__(self) -> None:
        check_groups(self.groups, self.parameters)
        for name, parameter in self.parameters.items():
            parameter.check(name, self.rules[name])

    @functools.cached_property
    def rules(self) -> dict[str, Rule]:
        """The rule of each parameter, by name."""
        return rules_of(self.groups)

    @property
    def holds_parameters(self) -> bool:
        """Whether it contains all parameters."""
        return all(parameter.parameter is not None for parameter in self.parameters.values())
