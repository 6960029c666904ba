r"""Loss scaling: gradients of float16 computations are kept in range by scaling the loss.

    gradient of scale*loss        g <- g / scale        all finite: update        otherwise: skip, scale <- scale/factor

The scale lives in the training state, so that it is saved and restored with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import Range, check_number


class LossScale(NamedTuple):
    """The factor by which the loss is multiplied before it is differentiated; `dynamic_loss_scale` makes one."""

    scale: jax.Array  # shape=(), dtype=float32
    finite_steps: jax.Array  # shape=(), dtype=int32: updates since the scale last changed
    period: jax.Array | None  # shape=(), dtype=int32; None for a fixed scale
    factor: jax.Array | None  # shape=(), dtype=float32; None for a fixed scale


def dynamic_loss_scale(initial: float = 2.0**15, *, period: int = 2000, factor: float = 2.0) -> LossScale:
    """Return a loss scale for `init_train_state` that grows until gradients overflow, and is halved then.

    Args:
        initial: the first scale, in [1, inf); a power of two changes no digit.
        period: the number of finite steps in a row after which the scale is multiplied by `factor`.
        factor: the scale is divided by it (not below 1) after a step that was not finite, in (1, inf).

    Raises:
        InvalidArgumentError: a value out of its range.
    """
    check_number("factor", factor, Range(1.0, low_included=False))
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise InvalidArgumentError(f"period={period!r} is not possible; it must be an integer in [1, inf).")
    every, by = jnp.asarray(period, jnp.int32), jnp.asarray(factor, jnp.float32)
    return LossScale(_initial("initial", initial), jnp.zeros([], jnp.int32), every, by)


def after_step(loss_scale: LossScale, finite: jax.Array, tried: jax.Array | bool = True) -> LossScale:
    """Return the scale of the next step.

    Args:
        loss_scale: the scale of this step.
        finite: 0-d boolean: all gradients of this step were finite.
        tried: 0-d boolean: False for a step that was skipped for another reason.
    """
    if loss_scale.period is None or loss_scale.factor is None:
        return loss_scale
    steps = jnp.where(finite, loss_scale.finite_steps + 1, 0)
    grows = steps >= loss_scale.period
    raised = jnp.minimum(loss_scale.scale * loss_scale.factor, jnp.finfo(jnp.float32).max / loss_scale.factor)
    lowered = jnp.maximum(loss_scale.scale / loss_scale.factor, 1.0)
    scale = jnp.where(finite, jnp.where(grows, raised, loss_scale.scale), lowered)
    steps = jnp.where(grows, 0, steps)
    return loss_scale._replace(
        scale=jnp.where(tried, scale, loss_scale.scale),
        finite_steps=jnp.where(tried, steps, loss_scale.finite_steps).astype(jnp.int32),
    )


def as_loss_scale(given: LossScale | float | None) -> LossScale | None:
    """Return the `loss_scale` argument of `init_train_state` as a `LossScale`; a number is a fixed scale.

    Raises:
        InvalidArgumentError: something else, or a number out of range.
    """
    if given is None or isinstance(given, LossScale):
        return given
    return LossScale(_initial("loss_scale", given), jnp.zeros([], jnp.int32), None, None)


def _initial(name: str, value: float) -> jax.Array:
    check_number(name, value, Range(1.0))
    return jnp.asarray(value, jnp.float32)
