"""The hyperparameters of an update: one frozen, validated value for each rule, the same for every frontend and backend."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, get_type_hints

from .errors import InvalidArgumentError

Scalar = Any
"""A Python number, or a 0-d array of the frontend (a learning rate on the device, a traced schedule)."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers an argument may take: an interval, its ends included or not; always finite."""

    low: float
    high: float = math.inf
    low_included: bool = True

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval. NaN and the infinities never do."""
        above = value >= self.low if self.low_included else value > self.low
        return above and value < self.high

    def __str__(self) -> str:
        return f"{'[' if self.low_included else '('}{self.low:g}, {self.high:g})"


DECAY = Range(0.0, 1.0)
"""Of the decay of a running mean (beta1, beta2, momentum)."""

POSITIVE = Range(0.0, low_included=False)
NOT_NEGATIVE = Range(0.0)


HIGH_FULLY_DECOUPLED_DECAY = 1e-3
"""From this weight_decay on, fully decoupled decay (not multiplied by the learning rate) deserves a warning."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """What a setting may be that is not a number of the arithmetic, but chooses what is computed.

    Args:
        described: for errors: "True or False".
        allows: whether it may be this value.
    """

    described: str
    allows: Callable[[Any], bool]


FLAG = Constant("True or False", lambda value: isinstance(value, bool))


def is_zero(value: Scalar) -> bool:
    """Whether a Python number is zero, so that its term can be left out; arrays are not read."""
    return isinstance(value, numbers.Real) and value == 0


def check_number(name: str, value: Any, allowed: Range) -> None:
    """Raise `InvalidArgumentError` unless `value` is a real number in `allowed`.

    Args:
        name: the argument as the user typed it.
        value: a number. An array or a tracer is not looked into: that could wait for a device, or be impossible.
        allowed: the interval it must lie in.
    """
    if isinstance(value, bool) or (not isinstance(value, numbers.Real) and not hasattr(value, "dtype")):
        raise InvalidArgumentError(f"{name}={value!r} is not a number; it must be one in {allowed}.")
    if isinstance(value, numbers.Real) and not allowed.contains(float(value)):
        raise InvalidArgumentError(f"{name}={value!r} is out of range; it must be in {allowed}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    r"""What an update needs besides arrays: what every rule has. A rule adds its own in a subclass.

    A number is annotated with the `Range` that it must lie in, another setting with a `Constant`; in a subclass both also with
    what they are.

    Args:
        learning_rate: step size, in [0, inf).
        weight_decay: in [0, inf); what it multiplies depends on the rule.
        decouple_lr: fully decoupled decay: scaled by learning_rate / max_lr instead of learning_rate.
        max_lr: the highest learning rate of the schedule, in (0, inf); required with decouple_lr.
        maximize: ascend instead of descend.
        names: how the frontend spells the fields, for its error messages ({"learning_rate": "lr"}).

    Raises:
        InvalidArgumentError: a value outside of its range; the text names the argument, the value and the range.
    """

    learning_rate: Annotated[Scalar, NOT_NEGATIVE]
    weight_decay: Annotated[Scalar, NOT_NEGATIVE]
    max_lr: Annotated[Scalar | None, POSITIVE] = None
    decouple_lr: bool = False
    maximize: bool = False
    names: dataclasses.InitVar[Mapping[str, str] | None] = None
    RANGES: ClassVar[Mapping[str, Range]]
    """The hyperparameters that are numbers, and the interval of each."""
    CONSTANTS: ClassVar[Mapping[str, Constant]]
    """The others, and what each may be."""
    MEANINGS: ClassVar[Mapping[str, str]]
    """What the hyperparameters of a rule alone are, in a few words."""

    def __post_init__(self, names: Mapping[str, str] | None) -> None:
        spelled = dict(names or {})
        for field, allowed in self.RANGES.items():
            value = getattr(self, field)
            if value is None and field == "max_lr":
                if self.decouple_lr:
                    raise InvalidArgumentError(
                        f"{spelled.get('max_lr', 'max_lr')}=None is not possible with decouple_lr=True; give the highest "
                        f"learning rate of the schedule, a number in {allowed}."
                    )
                continue
            check_number(spelled.get(field, field), value, allowed)
        for field, constant in self.CONSTANTS.items():
            if not constant.allows(value := getattr(self, field)):
                raise InvalidArgumentError(f"{field}={value!r} must be {constant.described}.")

    def __init_subclass__(cls) -> None:
        _read_annotations(cls)

    @property
    def decay_rate(self) -> Scalar:
        """What multiplies the parameter inside the step: weight_decay, or weight_decay / max_lr when fully decoupled."""
        return self.weight_decay / self.max_lr if self.decouple_lr else self.weight_decay

    @property
    def fully_decoupled_decay_is_high(self) -> bool:
        """Whether weight_decay looks like one meant to be multiplied by the learning rate, which here it is not."""
        return self.decouple_lr and float(self.weight_decay) >= HIGH_FULLY_DECOUPLED_DECAY


def _read_annotations(cls: type[Hyperparameters]) -> None:
    """Set what is known of the hyperparameters from their annotations."""
    hints = get_type_hints(cls, include_extras=True)
    found = {name: hint.__metadata__ for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    cls.RANGES = {name: first for name, (first, *_) in found.items() if isinstance(first, Range)}
    cls.CONSTANTS = {name: first for name, (first, *_) in found.items() if isinstance(first, Constant)}
    cls.MEANINGS = {name: meaning for name, (_, *rest) in found.items() for meaning in rest}


_read_annotations(Hyperparameters)
