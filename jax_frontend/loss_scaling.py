r"""Loss scaling: gradients of float16 computations are kept in range by scaling the loss.

    gradient of scale*loss        g <- g / scale        all finite: update        otherwise: skip, scale <- scale/factor

The scale lives in the training state, so that it is saved and restored with it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..core.errors import InvalidArgumentError
from ..core.hyperparameters import Range, check_number


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "finite_steps"], meta_fields=["period", "factor"])
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before it is differentiated; see `dynamic_loss_scale`.

    scale: 0-d float32. finite_steps: 0-d int32, updates since the scale last changed. period: None for a fixed scale.
    """

    scale: jax.Array
    finite_steps: jax.Array
    period: int | None
    factor: float

    def after(self, finite: jax.Array, tried: jax.Array | bool = True) -> LossScale:
        """The scale of the next step.

        Args:
            finite: 0-d boolean: all gradients of this step were finite.
            tried: 0-d boolean: False for a step that was skipped for another reason.
        """
        if self.period is None:
            return self
        steps = jnp.where(finite, self.finite_steps + 1, 0)
        grows = steps >= self.period
        raised = jnp.minimum(self.scale * self.factor, jnp.finfo(jnp.float32).max / self.factor)
        scale = jnp.where(finite, jnp.where(grows, raised, self.scale), jnp.maximum(self.scale / self.factor, 1.0))
        steps = jnp.where(grows, 0, steps)
        return dataclasses.replace(
            self,
            scale=jnp.where(tried, scale, self.scale),
            finite_steps=jnp.where(tried, steps, self.finite_steps).astype(jnp.int32),
        )


def dynamic_loss_scale(initial: float = 2.0**15, *, period: int = 2000, factor: float = 2.0) -> LossScale:
    """A loss scale for `init_train_state` that finds the largest value by itself.

    Args:
        initial: the first scale, in [1, inf); a power of two changes no digit.
        period: after so many finite steps in a row the scale is multiplied by `factor`.
        factor: the scale is divided by it (not below 1) after a step that was not finite, in (1, inf).

    Raises:
        InvalidArgumentError: a value out of its range.
    """
    check_number("factor", factor, Range(1.0, low_included=False))
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise InvalidArgumentError(f"period={period!r} is not possible; it must be an integer in [1, inf).")
    return LossScale(_initial("initial", initial), jnp.zeros([], jnp.int32), period, float(factor))


def as_loss_scale(given: LossScale | float | None) -> LossScale | None:
    """What `init_train_state` was given; a number is a fixed scale.

    Raises:
        InvalidArgumentError: something else, or a number out of range.
    """
    if given is None or isinstance(given, LossScale):
        return given
    return LossScale(_initial("loss_scale", given), jnp.zeros([], jnp.int32), None, 1.0)


def _initial(name: str, value: float) -> jax.Array:
    check_number(name, value, Range(1.0))
    return jnp.asarray(value, jnp.float32)
