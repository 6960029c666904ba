"""Training in JAX: parameters in the row's dtype, all else in float32."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from penstock import jax_frontend
from penstock.demonstration.jax_model import make_loss
from penstock.demonstration.settings import ModelShape
from penstock.jax_frontend import make_update, param_labels_for_muon

from .rows import ROWS, Settings


@functools.cache
def gradient_of(shape: ModelShape) -> Callable[..., Any]:
    """Return the jitted (parameters, batch) -> (loss, gradients)."""
    loss = make_loss(shape)

    def in_float32(parameters: Any, batch: Any) -> Any:
        return loss(jax.tree.map(lambda parameter: parameter.astype(jnp.float32), parameters), batch)

    return jax.jit(jax.value_and_grad(in_float32))


@functools.lru_cache(maxsize=1)  # of one row, whose seeds are trained one after the other
def transform_and_update(name: str, settings: Settings) -> tuple[Any, Any]:
    """Return the transform of a row, and its jitted update."""
    row = ROWS[name]

    def rate(count: Any) -> Any:
        return jnp.asarray(rates)[count]

    rates = [settings.learning_rate(row, step) for step in range(settings.steps)]

    def make(name: str, **more: Any) -> Any:
        transform = getattr(jax_frontend, name)
        asked = dict(row.asked)
        if dtype := asked.pop("state_dtype", None):
            asked |= {given: dtype for given in ("mu_dtype", "nu_dtype") if given in inspect.signature(transform).parameters}
        return transform(rate, weight_decay=settings.weight_decay, **asked, **more)

    if row.optimizer == "Muon":
        parts = {"muon": make("muon", adjust_lr_fn="match_rms_adamw"), "adamw": make("adamw")}
        tx = optax.partition(parts, param_labels_for_muon)
    else:
        tx = make(row.optimizer.lower())
    return tx, make_update(tx)


def train(name: str, settings: Settings, seed: int) -> list[float]:
    """Return the loss of every step."""
    tx, update = transform_and_update(name, settings)
    gradient = gradient_of(settings.shape)
    parameters: Any = {each: jnp.asarray(value, ROWS[name].dtype) for each, value in settings.initial(seed).items()}
    state = tx.init(parameters)
    losses = []
    for batch in settings.batches(seed):
        loss, gradients = gradient(parameters, batch)
        parameters, state = update(gradients, state, parameters)
        losses.append(float(loss))
    return losses
