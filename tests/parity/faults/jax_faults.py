"""Faults in the JAX frontend: transforms, training step, and the reverse walk."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock import jax_frontend
from penstock.core import compensation
from penstock.jax_frontend import train_step
from penstock.jax_frontend.arguments import Arguments
from penstock.jax_frontend.array_ops import JaxOps
from penstock.jax_frontend.direct import apply_directly
from penstock.jax_frontend.walk import in_state, passes, release_step, step_settings

from .planting import Fault, instead, value


def _whole_stack_at_once(stack: Any, tx: Any, **options: Any) -> Any:
    """The step that a plain gradient and one update make: each stacked array is one tensor."""

    def whole(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(stack)(state.params, batch)
        of_layers, count = state.opt_state.layers, state.opt_state.layers.count
        layers, new = apply_directly(tx, g["layers"], of_layers._replace(count=count[0]), state.params["layers"])
        new = new._replace(count=count + 1)
        params = {"outer": state.params["outer"], "layers": layers}
        return state._replace(params=params, opt_state=state.opt_state._replace(layers=new)), {"loss": loss}

    return jax.jit(whole, donate_argnums=0)


def _wrong_layer(correct: Any, tree: Any, slices: Any, index: Any) -> Any:
    return correct(tree, slices, (index + 1) % passes.length(tree))


def _updated_slice(correct: Any, layer_pass: Any, layer: Any, *rest: Any) -> Any:
    """The layer is differentiated where its update has moved it already, by about a step."""
    return correct(layer_pass, jax.tree.map(lambda leaf: leaf + 1e-3 * jnp.sign(leaf), layer), *rest)


def _norm_of_layers(correct: Any, g: Any, dtype: Any) -> Any:
    return release_step.no_squares(dtype) if "scalar" in g else correct(g, dtype)


def _still_scaled(correct: Any, self: Any, g: Any, params: Any, scale: Any = None, norm: Any = None) -> Any:
    return correct(self, g, params, None, norm)


def _each_by_itself(correct: Any, grads: Any, norm: Any, max_norm: float) -> Any:
    return jax.tree.map(lambda g: correct(g, train_step.global_norm(g), max_norm), grads)


def _plant_schedule(patch: pytest.MonkeyPatch) -> None:
    correct = Arguments.hyperparameters
    patch.setattr(
        Arguments,
        "hyperparameters",
        lambda self, count, *, check_schedules=True: correct(self, count + 1, check_schedules=check_schedules),
    )


FAULTS = [
    Fault("schedule off by one", _plant_schedule, "schedule/adamw/float32/none/state-default", "jax"),
    Fault(
        "compensation optimised away",
        value(JaxOps, "round_to", lambda self, x, dtype: x),
        "B/adamw/float16/kahan/state-default",
        "jax",
        20,
    ),
    Fault(
        "compensation never read",
        instead(compensation, "load", lambda correct, ops, how, stored: correct(ops, "none", stored)),
        "B/adamw/bfloat16/split/state-default",
        "jax",
        20,
    ),
    Fault(
        "micro-batches summed instead of averaged",
        instead(train_step, "divided", lambda correct, grads, denominator, params: correct(grads, 1.0, params)),
        "events/hold/adamw/float32",
        "jax",
    ),
    Fault(
        "gradient not clipped",
        instead(train_step, "clipped", lambda correct, grads, norm, max_norm: grads),
        "events/clip/stable_adamw/bfloat16",
        "jax",
    ),
    Fault(
        "every gradient clipped by its own norm",
        instead(train_step, "clipped", _each_by_itself),
        "events/clip/stable_adamw/bfloat16",
        "jax",
    ),
    Fault(
        "weight decay dropped",
        instead(
            Arguments,
            "hyperparameters",
            lambda correct, self, count, **options: dataclasses.replace(correct(self, count, **options), weight_decay=0.0),
        ),
        "B/adam/float32/none/state-default",
        "jax",
    ),
    Fault(
        "the walk updates the wrong layer",
        instead(passes, "put", _wrong_layer),
        "B/adamw/float32/none/state-default",
        "walk",
    ),
    Fault(
        "the walk reads the updated slice",
        instead(passes, "gradient", _updated_slice),
        "trajectories/release/stable_adamw/float32",
        "walk",
    ),
    Fault(
        "mean square over the whole stack",
        value(jax_frontend, "make_release_step", _whole_stack_at_once),
        "B/stable_adamw/float32/none/state-default",
        "walk",
    ),
    Fault(
        "the walk decays the moments for every micro-batch",
        instead(
            in_state,
            "accumulate",
            lambda correct, tx, arrays, g, *, first: correct(tx, arrays, g, first=True),
        ),
        "events/state/stable_adamw/float32",
        "walk",
    ),
    Fault(
        "the walk clips by the norm of its layers only",
        instead(release_step, "squares", _norm_of_layers),
        "events/clip/stable_adamw/bfloat16",
        "walk",
    ),
    Fault(
        "the walk does not unscale",
        instead(step_settings.StepSettings, "ready", _still_scaled),
        "events/overflow/stable_adamw/bfloat16",
        "walk",
    ),
]
