"""Asking a transform what it is: its rule and its hyperparameters, through whatever is chained before or wrapped around it.

A chain of Optax hides what it consists of. But it passes extra arguments on: one of them is an `Enquiry`, which penstock's
transforms answer when an update is traced. Nothing is computed.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from ..core.rules import Rule
from .buffers import is_concrete
from .direct import as_transformation
from .state import AdamState, PyTree

if TYPE_CHECKING:
    from .arguments import Arguments

ARGUMENT = "penstock_enquiry"
"""Name of the extra argument that carries the `Enquiry` through chains."""

Settings = Mapping[str, float | bool | None]
"""Hyperparameters by the names of `core.hyperparameters.Hyperparameters`."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a transform said of one parameter.

    Args:
        rule: of the transform that updates it.
        settings: its hyperparameters, but for those that are schedules or arrays of the optimizer state.
    """

    rule: Rule
    settings: Settings


class Enquiry:
    """The question, and the answers by the parameter's path."""

    def __init__(self) -> None:
        self.answers: dict[jax.tree_util.KeyPath, Answer] = {}

    def hear(self, rule: Rule, arguments: Arguments, state: AdamState, decays: Iterable[bool]) -> None:
        """The answer of one transform.

        Args:
            rule, arguments: the transform's.
            state: its state; the parameters that it updates have leaves in it.
            decays: of each parameter, whether weight decay applies to it.
        """
        for (path, _), decaying in zip(jax.tree_util.tree_leaves_with_path(state.mu), decays, strict=True):
            self.answers[tuple(path)] = Answer(rule, settings_of(arguments, decaying))


def enquire(tx: Any, params: PyTree) -> dict[jax.tree_util.KeyPath, Answer]:
    """What penstock's transforms in tx say of each parameter, by its path; parameters of others have no answer.

    Args:
        tx: any Optax transform, or an object that stands for one.
        params: arrays or jax.ShapeDtypeStructs.
    """
    enquiry = Enquiry()
    # optax.MultiSteps hands extra arguments on, but not as the transform that it calls itself.
    asked = as_transformation(tx) if isinstance(tx, optax.GradientTransformation) else tx

    def update(params: PyTree) -> PyTree:
        return asked.update(params, asked.init(params), params, **{ARGUMENT: enquiry})

    jax.eval_shape(update, params)
    return enquiry.answers


def settings_of(arguments: Arguments, decaying: bool) -> Settings:
    """The hyperparameters that can be told as numbers."""
    decoupled = arguments.decouple_lr
    highest = arguments.learning_rate if arguments.max_lr is None else arguments.max_lr
    given = {
        "learning_rate": None if arguments.scales_only else arguments.learning_rate,
        "beta1": arguments.b1,
        "beta2": arguments.b2,
        "eps": arguments.eps,
        "weight_decay": arguments.weight_decay if decaying else 0.0,
        "max_lr": highest if decoupled else None,
    }
    known = {name: float(value) for name, value in given.items() if _is_number(value)}
    return {**known, **({} if decoupled else {"max_lr": None}), "decouple_lr": decoupled, "maximize": False}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or is_concrete(value) or isinstance(value, np.ndarray)
