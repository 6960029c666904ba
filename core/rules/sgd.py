"""Stochastic gradient descent: without momentum, with it, and with Nesterov's; weight decay as L2 or decoupled."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ..array_ops import Array
from ..errors import InvalidArgumentError
from ..hyperparameters import DECAY, FLAG, Hyperparameters, Scalar, is_zero
from .rule import Entered, Field, Fields, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDHyperparameters(Hyperparameters):
    """Those of stochastic gradient descent.

    Args:
        momentum: decay of the momentum, in [0, 1). Of the number 0 no momentum is kept.
        dampening: the momentum gets (1-dampening)*g, but the whole g in the first update; in [0, 1).
        nesterov: the step is g + momentum*m instead of m; needs momentum, and no dampening.
        decoupled_weight_decay: the decay is part of the step instead of the gradient.
    """

    momentum: Annotated[Scalar, DECAY, "decay of the momentum; with 0 none is kept"]
    dampening: Annotated[Scalar, DECAY, "the momentum gets (1-dampening)*g, but the whole g in the first update"]
    nesterov: Annotated[bool, FLAG, "take the step g + momentum*m; needs momentum, and no dampening"]
    decoupled_weight_decay: Annotated[bool, FLAG, "multiply weight_decay*p by lr only, instead of adding it to the gradient"]

    def __post_init__(self, names: Mapping[str, str] | None) -> None:
        super().__post_init__(names)
        damped = isinstance(self.dampening, numbers.Real) and self.dampening != 0
        if self.nesterov and (damped or is_zero(self.momentum)):
            raise InvalidArgumentError(
                f"nesterov=True is not possible with momentum={self.momentum} and dampening={self.dampening}; give a momentum "
                "above 0, and dampening=0."
            )


class Corrections(NamedTuple):
    """What the momentum and the gradient are multiplied by."""

    kept: Scalar
    entering: Scalar


def corrections(current: SGDHyperparameters, step: Scalar, xp: Any) -> Corrections:
    """momentum and 1-dampening, which is 1 in the first update."""
    entering = 1.0 - current.dampening
    if isinstance(step, numbers.Real):
        return Corrections(current.momentum, 1.0 if step == 1 else entering)
    return Corrections(current.momentum, xp.where(step == 1, xp.ones_like(step), entering))


def accumulate(
    current: SGDHyperparameters, corrections: Corrections, fields: Fields, gradient: Array, xp: Any, *, first: bool
) -> Fields:
    """Put a micro-batch into the momentum, if there is one; only the first of an update decays it."""
    kept, entering = corrections
    if not first:
        return tuple(momentum + entering * gradient for momentum in fields)
    return tuple(kept * momentum + entering * gradient for momentum in fields)


def plain(current: SGDHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any) -> Array:
    """Return the gradient."""
    assert entered is not None  # `Rule.needs_gradient`
    return entered.gradient


def heavy_ball(
    current: SGDHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any
) -> Array:
    """Return the momentum."""
    return fields[0]


def nesterov(current: SGDHyperparameters, corrections: Corrections, fields: Fields, entered: Entered | None, xp: Any) -> Array:
    """Return g + momentum*m."""
    assert entered is not None  # `Rule.needs_gradient`
    kept, _ = corrections
    return entered.gradient + kept * fields[0]


def chosen(own: Mapping[str, Any]) -> Rule:
    """Return the row of these settings."""
    row = SGD if is_zero(own["momentum"]) else SGD_NESTEROV if own["nesterov"] else SGD_MOMENTUM
    return WITH_DECOUPLED_DECAY[row] if own["decoupled_weight_decay"] else row


SGD = Rule(
    name="sgd",
    title="stochastic gradient descent, with or without momentum",
    mathematics="""
        g += weight_decay*p    m <- momentum*m + (1-dampening)*g        without dampening in the first update
        p <- p - lr*m        with nesterov: p <- p - lr*(g + momentum*m)        without momentum: p <- p - lr*g
    """,  # the decay is added once an update, to the first micro-batch's gradient, after unscaling and clipping
    source="Sutskever et al., 2013, https://proceedings.mlr.press/v28/sutskever13.html.",
    fields=(),
    hyperparameters=SGDHyperparameters,
    defaults={
        "learning_rate": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "decoupled_weight_decay": False,
    },
    corrections=corrections,
    accumulate=accumulate,
    direction=plain,
    needs_gradient=True,
    l2=True,
    variant=chosen,
)
SGD_MOMENTUM = dataclasses.replace(
    SGD,
    name="sgd_momentum",
    fields=(Field("momentum_buffer"),),
    defaults={**SGD.defaults, "momentum": 0.9},
    direction=heavy_ball,
    needs_gradient=False,
    linear=True,
)
SGD_NESTEROV = dataclasses.replace(
    SGD_MOMENTUM,
    name="sgd_nesterov",
    defaults={**SGD_MOMENTUM.defaults, "nesterov": True},
    direction=nesterov,
    needs_gradient=True,
    linear=False,
)
WITH_DECOUPLED_DECAY = {
    row: dataclasses.replace(row, name=name, l2=False, defaults={**row.defaults, "decoupled_weight_decay": True})
    for row, name in ((SGD, "sgdw"), (SGD_MOMENTUM, "sgdw_momentum"), (SGD_NESTEROV, "sgdw_nesterov"))
}
ROWS_OF_SGD = (*WITH_DECOUPLED_DECAY, *WITH_DECOUPLED_DECAY.values())
"""The rules that settings of SGD choose from, `chosen`."""
