"""The arguments of a transform: hyperparameters, schedules, and the mask of weight decay."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import compensation as compensations
from ..core.codings import EIGHT_BIT, StateDtypes, check_stored, random_fields, state_dtypes
from ..core.errors import InvalidArgumentError, PenstockError
from ..core.hyperparameters import Hyperparameters, Scalar
from ..core.random_bits import check_seed
from ..core.rules import Field, Rule
from .buffers import is_concrete
from .state import PyTree

Schedule = Callable[[Any], Any]
ScalarOrSchedule = Scalar | Schedule
Mask = PyTree | Callable[[PyTree], PyTree] | None

NAMES = {"beta1": "b1", "beta2": "b2", "beta3": "b3"}
"""The names of hyperparameters in Optax."""

_LOW_PRECISION = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a transform; Python numbers are checked at once, traced ones and schedules cannot be.

    own: the hyperparameters of the rule alone, by core's names; the others as in `stable_adamw`; scales_only: the transform
    returns the direction, neither negated nor times a learning rate.
    """

    rule: Rule
    learning_rate: ScalarOrSchedule
    own: Mapping[str, Any]
    weight_decay: ScalarOrSchedule
    mask: Mask = None
    mu_dtype: Any = None
    nu_dtype: Any = None
    decouple_lr: bool = False
    max_lr: Scalar | None = None
    compensation: str = "auto"
    seed: int | None = None
    scales_only: bool = False

    def __post_init__(self) -> None:
        self.hyperparameters(0, check_schedules=False)
        compensations.resolve(self.compensation, "bfloat16")
        if hasattr(self.seed, "dtype"):
            raise InvalidArgumentError(
                "seed is an array, and it must be a Python int; give optax.inject_hyperparams static_args=('seed',)."
            )
        check_seed(0 if self.seed is None else self.seed)
        self.dtypes("float32")
        for argument in {"mu_dtype", "nu_dtype"} - {dtype_argument(field) for field in self.rule.fields}:
            if getattr(self, argument) is not None:
                raise InvalidArgumentError(
                    f"{argument}={getattr(self, argument)!r} is not possible for {self.rule.name}, which keeps no such state; "
                    "leave it out."
                )

    def hyperparameters(self, count: Any, *, check_schedules: bool = True) -> Hyperparameters:
        """Return the hyperparameters of the update after `count` others.

        Args:
            count: as Optax counts for schedules, from 0 on.
            check_schedules: evaluate the schedules; otherwise 0 is used for them.
        """
        learning_rate, weight_decay = (
            (value(count) if check_schedules else 0.0) if callable(value) else value
            for value in (self.learning_rate, self.weight_decay)
        )
        for field, value in self.own.items():
            name = NAMES.get(field, field)
            if not isinstance(value, numbers.Real) and getattr(value, "dtype", None) in _LOW_PRECISION:
                raise InvalidArgumentError(
                    f"{name} is a {value.dtype} array, in which it may round to a value out of its range; give a Python "
                    "number or a float32 array: optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
                )
            if name in self.rule.hyperparameters.CONSTANTS and isinstance(value, jax.Array):
                raise InvalidArgumentError(
                    f"{name} is an array, and it chooses what is computed; give optax.inject_hyperparams "
                    f"static_args={tuple(self.rule.hyperparameters.CONSTANTS)}."
                )
        highest_by_default = self.decouple_lr and self.max_lr is None and isinstance(self.learning_rate, numbers.Real)
        hyperparameters = self.rule.hyperparameters(
            **self.own,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            decouple_lr=self.decouple_lr,
            max_lr=self.learning_rate if highest_by_default else self.max_lr,
            names=NAMES,
        )
        for field in hyperparameters.RANGES:
            if shape := getattr(getattr(hyperparameters, field), "shape", ()):
                raise InvalidArgumentError(f"{NAMES.get(field, field)} has shape {shape}; it must be a number or a 0-d array.")
        return hyperparameters

    def dtypes(self, parameter_dtype: str, shape: Sequence[int] | None = None) -> StateDtypes:
        """Return the dtypes of the rule's fields for a parameter of this shape, or for a large matrix."""
        fields, asked, arguments = self.rule.fields, self._asked, self._dtype_arguments
        return state_dtypes(fields, parameter_dtype, self._field_decays, asked, shape=shape, arguments=arguments)

    def check_stored(self, stored: StateDtypes, parameter: Any, described: str) -> None:
        """Raise `InvalidArgumentError` if the fields of a parameter are stored in another coding than is asked for."""
        fields, asked, arguments = self.rule.fields, self._asked, self._dtype_arguments
        dtype = jnp.result_type(parameter).name
        # Of a parameter that is sharded over devices the shape may be that of a part.
        expected = [self.dtypes(dtype, shape) for shape in (jnp.shape(parameter), None)]
        check_stored(fields, dtype, stored, asked, expected, arguments=arguments, described=described)

    @property
    def _dtype_arguments(self) -> list[str]:
        return [dtype_argument(field) for field in self.rule.fields]

    @property
    def _asked(self) -> list[str | None]:
        given = [(getattr(self, argument), argument) for argument in self._dtype_arguments]
        return [None if dtype is None else _dtype_name(dtype, argument) for dtype, argument in given]

    def rounds_by_chance(self, parameter_dtype: str, dtypes: StateDtypes) -> bool:
        """Whether the parameter or a field is rounded stochastically.

        Args:
            parameter_dtype: of the parameter.
            dtypes: of its fields.
        """
        resolved = compensations.resolve(self.compensation, parameter_dtype)
        fields = random_fields(self.rule.fields, dtypes, self._field_decays)
        return bool(fields) or resolved in compensations.WITH_RANDOM_BITS

    @property
    def may_round_by_chance(self) -> bool:
        """Whether there may be a parameter for which something is rounded stochastically."""
        return any(self.rounds_by_chance(dtype, self.dtypes(dtype)) for dtype in ("float32", "bfloat16"))

    @property
    def _field_decays(self) -> list[Scalar | None]:
        return [None if field.beta is None else self.own[field.beta] for field in self.rule.fields]

    @property
    def betas(self) -> dict[str, Scalar]:
        """The betas that fields are debiased by, by core's names."""
        return {field.beta: self.own[field.beta] for field in self.rule.fields if field.beta is not None}

    @property
    def betas_may_change(self) -> bool:
        """Whether b1 or b2 is an array, which may have another value in the next update."""
        return not all(isinstance(beta, numbers.Real) for beta in self.betas.values())

    @property
    def decays(self) -> bool:
        """Whether weight_decay may be anything but zero."""
        return not (isinstance(self.weight_decay, numbers.Real) and self.weight_decay == 0)


def dtype_argument(field: Field) -> str:
    """Return the argument for the dtype of a rule's field, by Optax's names for those of Adam."""
    return "nu_dtype" if field.of_squares else "mu_dtype"


Settings = Mapping[str, Any]
"""Hyperparameters by the names of `core.hyperparameters.Hyperparameters`."""


def settings_of(arguments: Arguments, decays: bool) -> Settings:
    """Return the hyperparameters of a parameter, but for schedules and arrays of the optimizer state.

    Args:
        arguments: of the transform that updates it.
        decays: weight decay applies to it.
    """
    decoupled = arguments.decouple_lr
    highest = arguments.learning_rate if arguments.max_lr is None else arguments.max_lr
    given = {
        "learning_rate": None if arguments.scales_only else arguments.learning_rate,
        **arguments.own,
        "weight_decay": arguments.weight_decay if decays else 0.0,
        "max_lr": highest if decoupled else None,
    }
    known: dict[str, Any] = {name: given[name] for name in arguments.rule.hyperparameters.CONSTANTS}
    known |= {name: float(value) for name, value in given.items() if name not in known and _is_number(value)}
    return {**known, **({} if decoupled else {"max_lr": None}), "decouple_lr": decoupled, "maximize": False}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or is_concrete(value) or isinstance(value, np.ndarray)


def _dtype_name(dtype: Any, argument: str) -> str:
    if isinstance(dtype, str) and dtype == EIGHT_BIT:
        return dtype
    try:
        return jnp.dtype(dtype).name
    except (TypeError, ValueError) as error:  # ValueError: a string that starts with a number
        raise InvalidArgumentError(f"{argument}={dtype!r} is not a dtype; give a floating-point one, or '8bit'.") from error


def decayed(mask: Mask, params: PyTree) -> PyTree:
    """Return a tree like params of Python booleans: whether weight decay applies."""
    tree = mask(params) if callable(mask) else mask

    def broadcast(applies: Any, below: PyTree) -> PyTree:
        if not isinstance(applies, bool | np.bool_):
            raise InvalidArgumentError(f"mask has {applies!r} as a leaf; a mask is a tree of True and False.")
        return jax.tree.map(lambda _: bool(applies), below)

    try:
        return jax.tree.map(broadcast, tree, params)
    except PenstockError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(
            f"mask has the structure {jax.tree.structure(tree)}, not that of params, {jax.tree.structure(params)}, nor of a "
            "prefix of it. Give a mask of these parameters; or, as where each layer is updated by itself, a function of "
            "them, such as lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)."
        ) from error
