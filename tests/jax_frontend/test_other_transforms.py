"""Transforms that are not penstock's, and wrappers around its own, train in make_train_step as in Optax's own loop."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.support.jax_training import assert_close, float64, train, train_directly

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.jax_frontend import (
    LayerStack,
    adamw,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    stable_adamw,
)

PARAMS = {"a": jnp.asarray([1.0, 2.0, 3.0]), "b": jnp.asarray([-1.0, 0.5, 2.0])}
BATCH = jnp.asarray([[0.5, -1.0, 2.0], [1.0, 1.0, -0.5]])


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch * params["a"] - params["b"]) ** 2)


def jitted(tx: Any) -> Any:
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def vmapped(tx: Any) -> Any:
    return optax.GradientTransformationExtraArgs(
        jax.vmap(tx.init), lambda *given, **extra: jax.vmap(tx.update)(*given, **extra)
    )


def giving(tx: Any, params_of: Any) -> Any:
    """A wrapper that gives its inner transform other parameters, or none."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return tx.update(updates, state, params_of(params), **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def sam() -> Any:
    return optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))


def largest(updates: Any) -> jax.Array:
    return jnp.max(updates["a"])


WRAPPED: dict[str, Any] = {
    "a jitted update": jitted(adamw(0.1)),
    "a jitted update of Optax": jitted(optax.with_extra_args_support(optax.adamw(0.1))),
    "a vmapped update": vmapped(adamw(0.1)),
    "no parameters": giving(adamw(0.1, weight_decay=0.0), lambda params: None),
    "zeros as parameters": giving(adamw(0.1), lambda params: jax.tree.map(jnp.zeros_like, params)),
    "each other's parameters": giving(stable_adamw(0.1), lambda params: {"a": params["b"], "b": params["a"]}),
}
TRANSFORMS: dict[str, Any] = {
    **WRAPPED,
    "sam": sam(),
    "noise with a key": optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": optax.polyak_sgd(),
    "momo": optax.contrib.momo(),
}
if hasattr(optax, "monitor"):
    measures = {"largest": largest, "ema": optax.measure_with_ema(largest, decay=0.9)}
    TRANSFORMS["monitor"] = optax.chain(optax.sgd(0.1), optax.monitor(measures))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_train_step_equals_optax_s_loop(name: str) -> None:
    tx = optax.with_extra_args_support(TRANSFORMS[name])
    takes_value = name in ("reduce_on_plateau", "polyak", "momo")
    params, state = PARAMS, tx.init(PARAMS)
    step, released = make_train_step(loss, TRANSFORMS[name]), init_train_state(TRANSFORMS[name], PARAMS)
    for _ in range(3):
        value, grads = jax.value_and_grad(loss)(params, BATCH)
        updates, state = tx.update(grads, state, params, **({"value": value} if takes_value else {}))
        params = optax.apply_updates(params, updates)
        released, _ = step(released, BATCH)
    assert_close(released.params, params, rtol=1e-5, atol=1e-6)
    init_train_state(TRANSFORMS[name], PARAMS)  # a key of the transform's own was not donated


@pytest.mark.parametrize("name", [name for name in WRAPPED if name != "each other's parameters"])
def test_updates_and_layers_equal_optax_s_loop(name: str) -> None:
    """A deposit of a transform is taken for the very parameter that it was given, and for no other one."""
    tx, grads = WRAPPED[name], [jax.grad(loss)(PARAMS, BATCH)]
    assert_close(train_directly(tx, PARAMS, grads)[0], train(tx, PARAMS, grads)[0], rtol=1e-6)
    updated, _ = make_update(tx)(jax.tree.map(jnp.copy, grads[0]), tx.init(PARAMS), jax.tree.map(jnp.copy, PARAMS))
    expected = train(tx, PARAMS, grads)[0]
    assert_close(updated, expected, rtol=1e-6)
    if name == "a vmapped update":  # one number for all layers
        return
    stack = LayerStack(lambda outer, batch: jnp.zeros(()), lambda layer, x: x + loss(layer, BATCH), lambda outer, x, batch: x)
    state = init_train_state(tx, {"outer": {}, "layers": jax.tree.map(lambda leaf: leaf[None], PARAMS)})
    state, _ = make_release_step(stack, tx)(state, BATCH)
    assert_close(jax.tree.map(lambda leaf: leaf[0], state.params["layers"]), expected, rtol=1e-5)


def test_a_compensated_transform_inside_of_a_jitted_one_is_refused() -> None:
    """Its exact parameters are not known outside."""
    tx, params = jitted(adamw(0.1)), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), PARAMS)
    with pytest.raises(RefusedError, match="hides whether it does"):
        make_update(tx)(jax.tree.map(jnp.copy, params), tx.init(params), params)


@pytest.mark.parametrize("tx", [optax.lookahead(optax.sgd(0.1), 5, 0.5), optax.lbfgs()], ids=["lookahead", "lbfgs"])
def test_a_transform_that_needs_more_than_gradients_is_refused_with_the_remedy(tx: Any) -> None:
    """Lookahead has fast parameters to differentiate by, and slow ones besides."""
    params: Any = PARAMS
    if "lookahead" in str(tx.init):
        params = optax.LookaheadParams.init_synced(PARAMS)
    state = init_train_state(tx, params)
    step = make_train_step(lambda p, batch: loss(getattr(p, "fast", p), batch), tx)
    with pytest.raises(InvalidArgumentError, match=r"tx.update fails.*make_update"):
        step(state, BATCH)


def test_a_transform_without_a_hash_trains_in_the_walk() -> None:
    @dataclasses.dataclass  # with __eq__, and so without __hash__
    class Transform:
        init: Any
        update: Any

    tx: Any = Transform(*optax.sgd(0.1))
    stack = LayerStack(lambda outer, x: x, lambda layer, x: x * layer, lambda outer, x, batch: jnp.sum(x))
    state = init_train_state(tx, {"outer": {}, "layers": jnp.ones((2, 3))})
    state, _ = make_release_step(stack, tx)(state, jnp.ones(3))
    assert_close(state.params["layers"], jnp.full((2, 3), 0.9), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_strict_promotion_is_kept(dtype: str) -> None:
    stack = LayerStack(
        lambda outer, batch: batch, lambda layer, x: x + jnp.tanh(x @ layer), lambda outer, x, batch: jnp.mean(x * x)
    )
    with jax.numpy_dtype_promotion("strict"), float64() if dtype == "float64" else contextlib.nullcontext():
        tx, params = stable_adamw(1e-2), {"outer": {"scale": jnp.ones(())}, "layers": jnp.ones((2, 3, 3), dtype) / 3}
        state = init_train_state(tx, params)
        make_release_step(stack, tx, microbatches=2, max_norm=0.1)(state, jnp.ones((4, 3), dtype))
