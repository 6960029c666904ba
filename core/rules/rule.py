"""The description of a rule: what it keeps, how a gradient enters that, and what the step is proportional to."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..array_ops import Array, ArrayOps
from ..errors import RefusedError, UnsupportedTensorError
from ..hyperparameters import Hyperparameters, Scalar, is_zero

Fields = tuple[Array, ...]
"""The arrays that a rule keeps for one parameter, in the order of `Rule.fields`; inside a rule in the compute dtype."""


class Field(NamedTuple):
    """An array of the parameter's shape that a rule keeps between updates.

    Args:
        name: in states and portable files ("exp_avg").
        beta: the hyperparameter by which it is debiased: it is stored divided by 1-beta^t. None: it is not debiased.
        of_squares: it is a mean of squares, for which a low precision has too little range, or never decays it.
        is_mean: it is a mean though not debiased, where others of its name (SGD's momentum) are sums.
        is_precise: it has the parameter's precision at least, whatever the user asks for the state: its errors stay.
    """

    name: str
    beta: str | None = None
    of_squares: bool = False
    is_mean: bool = False
    is_precise: bool = False


class Entered(NamedTuple):
    """What entered the fields just now, for the directions that depend on it.

    Args:
        before: the fields without the gradient.
        gradient: as it entered them.
    """

    before: Fields
    gradient: Array


class Accumulate(Protocol):
    """Puts one micro-batch's gradient into the fields; the first of an update decays them."""

    def __call__(self, current: Any, corrections: Any, fields: Fields, gradient: Array, xp: Any, *, first: bool) -> Fields:
        """Return the new fields."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One optimizer. Its functions are pure, and take the array namespace last; their arrays are in the compute dtype.

    Args:
        name: its name in both frontends ("stable_adamw").
        title: what it is, in a few words.
        mathematics: of one update, by lines; `lr` is the learning rate.
        source: the paper.
        fields: what it keeps for each parameter.
        hyperparameters: what it needs besides arrays: a subclass of `Hyperparameters`.
        defaults: of the hyperparameters that have one, by name, in the order of its arguments.
        corrections: from the hyperparameters and the number of this update to the scalars that follow from both: a tuple. The
            rule reads its decays here only; elsewhere it may ask whether one is zero.
        accumulate: the fields after one more gradient.
        direction: from the hyperparameters, the corrections, the fields and an `Entered` to what the step is proportional to,
            decoupled decay apart.
        mean_square: from the hyperparameters, the fields and the gradient to a 0-d array, by whose root the step is divided
            where it is above 1 (Adafactor's update clipping). None: the rule does not clip.
        of_matrix: from the framework's operations, the hyperparameters and the direction to what the step is proportional to,
            where that needs a whole matrix at once. The rule then takes matrices only. None: the step is the direction.
        after_step: from the corrections, the fields and what the step adds to the parameter to the new fields and what is added
            instead, where a field follows the parameter. None: the step is added.
        l2: weight decay enters the gradient (L2 regularisation) instead of the step (decoupled decay).
        implicit_decay: decoupled decay is that of the new parameter: the step, with the decay of the old one, is divided by
            1 + lr*decay.
        clips_update: whether there is a mean_square.
        needs_gradient: `direction` reads its `Entered`, so that no step can be taken from the fields alone.
        linear: the fields are linear in the gradient, and the step follows from them alone: micro-batches that enter them one
            by one give the step of their sum.
        variant: from the values of `own_hyperparameters` to the row of `RULES` that they choose, of those that users know by
            one name, such as SGD with and without momentum. None: there is only this one.
    """

    name: str
    title: str
    mathematics: str
    source: str
    fields: tuple[Field, ...]
    hyperparameters: type[Hyperparameters]
    defaults: Mapping[str, Any]
    corrections: Callable[[Any, Scalar, Any], Any]
    accumulate: Accumulate
    direction: Callable[[Any, Any, Fields, Entered | None, Any], Array]
    mean_square: Callable[[Any, Fields, Array, Any], Array] | None = None
    of_matrix: Callable[[ArrayOps, Any, Array], Array] | None = None
    after_step: Callable[[Any, Fields, Array], tuple[Fields, Array]] | None = None
    l2: bool = False
    implicit_decay: bool = False
    needs_gradient: bool = False
    linear: bool = False
    variant: Callable[[Mapping[str, Any]], Rule] | None = None
    clips_update: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clips_update", self.mean_square is not None)

    @functools.cached_property
    def own_hyperparameters(self) -> tuple[str, ...]:
        """The names of the hyperparameters that this rule has and others have not."""
        return tuple(self.hyperparameters.MEANINGS)

    @property
    def betas(self) -> tuple[float, ...]:
        """The defaults of beta1, beta2 and so on."""
        return tuple(value for name, value in self.defaults.items() if name.startswith("beta"))

    @property
    def accumulation(self) -> str:
        """How micro-batches can enter the fields one by one: the value of the axis "rule" of `core.combinations`."""
        return "gradient" if self.needs_gradient else "linear" if self.linear else "squares"

    def step_size(self, current: Hyperparameters) -> Scalar:
        """Return what the step is multiplied by, unless the rule clips: lr, or with implicit decay lr/(1 + lr*decay)."""
        if not self.implicit_decay or is_zero(current.decay_rate):
            return current.learning_rate
        return current.learning_rate / (1.0 + current.learning_rate * current.decay_rate)

    def row(self, own: Mapping[str, Any]) -> Rule:
        """Return the rule that these values of `own_hyperparameters` choose."""
        return self if self.variant is None else self.variant(own)

    def is_of_one_kind_with(self, other: Rule | None) -> bool:
        """Whether both are the same rule, or rows that users know by one name."""
        return other is not None and (self is other or (self.variant is not None and self.variant is other.variant))

    def check_accumulates(self, instead: str) -> None:
        """Raise `RefusedError` unless a step can be taken from the fields alone, as accumulation="state" does.

        Args:
            instead: what the user can do.
        """
        if self.needs_gradient:
            raise RefusedError(
                f"accumulation='state' is not possible for {self.name}, "
                + ("whose step needs the whole gradient besides its state" if self.fields else "which keeps no state")
                + f"; {instead}."
            )

    def check_shape(self, shape: Sequence[int], described: str, remedy: str) -> None:
        """Raise `UnsupportedTensorError` for a parameter of a shape that the rule does not take.

        Args:
            shape: of the whole parameter.
            described: the parameter, for the error.
            remedy: what the user can do.
        """
        if self.of_matrix is not None and len(shape) != 2:
            raise UnsupportedTensorError(
                f"{described} has shape {tuple(shape)}, and {self.name} takes matrices only, of two dimensions; {remedy}."
            )

    def decays(self, current: Hyperparameters) -> tuple[Scalar | None, ...]:
        """Return the decay by which each field is debiased; None for one that is not."""
        return tuple(None if field.beta is None else getattr(current, field.beta) for field in self.fields)


def forgotten(field: Array, decay: Scalar, xp: Any) -> Array:
    """Return a field, or zeros where its decay is 0: m + (g-m) would keep rounding errors of m."""
    if isinstance(decay, numbers.Real):
        return xp.zeros_like(field) if decay == 0 else field
    return xp.where(decay == 0, xp.zeros_like(field), field)


def entered_mean(mean: Array, decay: Scalar, share: Scalar, entering: Array, xp: Any, *, first: bool) -> Array:
    """Return a mean with a micro-batch in it: m + share*(g-m), with which it decays; a later one of an update adds share*g."""
    if not first:
        return mean + share * entering
    mean = forgotten(mean, decay, xp)
    return mean + share * (entering - mean)
