"""Laws of every step, unrolled, walked or with a loop of its own: equal to the plain gradient and update, in donated memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, float64
from tests.support.jax_walk import (
    MASKED,
    STACK,
    TX,
    batch,
    each_loss,
    embed,
    layer,
    own_loop,
    parameters,
    reference,
)
from tests.support.rows import rows

from penstock.jax_frontend import (
    LayerStack,
    TrainState,
    WeightedMean,
    init_train_state,
    make_release_step,
    make_train_step,
    release_layers,
)

REFERENCES = hasattr(jax, "new_ref")
UNROLLED, WALK, LOOP = STEPS = ("make_train_step", "make_release_step", "release_layers")


def make(kind: str, stack: Any, tx: Any, **options: Any) -> Any:
    """A step of the model; a loop of its own has no options, and the loss of STACK."""
    if kind == UNROLLED:
        return make_train_step(stack, tx, **options)
    if kind == WALK:
        return make_release_step(stack, tx, **options)
    if not REFERENCES:
        pytest.skip("this jax has no jax.new_ref")
    return release_layers(own_loop if stack is STACK else stack, layer, tx, **options)


def start(kind: str, tx: Any, params: Any) -> TrainState:
    return init_train_state(tx, params, layered=kind != UNROLLED)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (STACK, {}),
    "micro-batches": (STACK, {"microbatches": 4}),
    "clip": (STACK, {"max_norm": 0.05}),
    "sum and weight, micro-batches, clip": (MASKED, {"microbatches": 4, "max_norm": 0.05}),
}
OF_KIND: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    UNROLLED: {
        **CASES,
        "no clip, one pass": (STACK, {"max_norm": 1e6, "clip_passes": 1}),
        "sum and weight, clip": (MASKED, {"max_norm": 0.05}),
        "clip, one pass": (STACK, {"max_norm": 0.05, "clip_passes": 1}),
    },
    WALK: {
        **CASES,
        "no clip, saved residuals": (STACK, {"max_norm": 1e6, "microbatches": 2, "save_residuals": True}),
        "no fence": (STACK, {"fence": "none"}),
        "sum and weight, saved residuals, barrier": (MASKED, {"save_residuals": True, "fence": "barrier"}),
    },
    LOOP: {"plain": (STACK, {}), "barrier": (STACK, {"fence": "barrier"})},
}


@functools.cache
def trajectory(kind: str, stack: LayerStack, max_norm: float | None) -> list[Any]:
    """Three plain steps: (state, loss, norm) after each; those of the walk are those of the loop."""
    plain, state, steps = reference(stack, TX, max_norm), start(kind, TX, parameters("float64")), []
    for _ in range(3):
        state, loss, norm = plain(state, batch())
        steps.append((state, loss, norm))
    return steps


PARTS_OF_OTHERS = [(UNROLLED, "micro-batches"), (UNROLLED, "sum and weight, clip"), (WALK, "micro-batches")]


@pytest.mark.parametrize(
    ("kind", "case"),
    rows([(kind, case) for kind, cases in OF_KIND.items() for case in cases], lambda row: row not in PARTS_OF_OTHERS),
)
def test_equals_the_plain_gradient_and_update_in_float64(kind: str, case: str) -> None:
    stack, options = OF_KIND[kind][case]
    with float64():
        step, state = make(kind, stack, TX, **options), start(kind, TX, parameters("float64"))
        for expected, loss, norm in trajectory(UNROLLED if kind == UNROLLED else WALK, stack, options.get("max_norm")):
            state, metrics = step(state, batch())
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
            assert not metrics["skipped"]
            assert_close(state, expected, rtol=1e-11, atol=1e-12)
        assert all(metrics[name].shape == () for name in ("loss", "grad_norm", "skipped"))
        assert step.jitted._cache_size() == 1


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return call


@pytest.mark.parametrize(
    ("kind", "rule", "dtype"),
    [
        (UNROLLED, "stable_adamw", "float32"),
        (UNROLLED, "adam", "bfloat16"),
        (WALK, "stable_adamw", "bfloat16"),
        (WALK, "adamw", "float32"),
        (LOOP, "adamw", "bfloat16"),
    ],
)
def test_a_step_learns_donates_and_compiles_once(kind: str, rule: str, dtype: str) -> None:
    tx, params, losses = TRANSFORMS[rule](optax.linear_schedule(3e-2, 0.0, 30)), parameters(dtype), []
    step, state = make(kind, STACK, tx, **({} if kind == LOOP else {"max_norm": 1.0})), start(kind, tx, params)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    for _ in range(15):
        given = jax.tree.leaves(state)
        state, metrics = step(state, batch())
        assert all(leaf.is_deleted() for leaf in given)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert step.jitted._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("kind", "weight", "options"),
    [
        (UNROLLED, 0, {"microbatches": 2}),
        (UNROLLED, float("nan"), {}),
        (WALK, 0, {"microbatches": 2, "fence": "conditional"}),
        (WALK, -1, {"microbatches": 2, "fence": "barrier"}),
        (WALK, float("nan"), {"microbatches": 2, "fence": "none"}),
    ],
)
def test_a_weight_that_is_not_positive_skips_the_update(kind: str, weight: float, options: dict[str, Any]) -> None:
    stack = LayerStack(embed, layer, lambda o, x, b: WeightedMean(each_loss(o, x, b).sum(), b["weight"].sum()))
    step, before = make(kind, stack, TX, **options), start(kind, TX, parameters())
    state, metrics = step(jax.tree.map(jnp.copy, before), {**batch(), "weight": jnp.full(8, weight, jnp.float32)})
    assert metrics["skipped"]
    assert_equal(state, before)
    state, metrics = step(state, {**batch(), "weight": jnp.ones(8)})
    assert not metrics["skipped"]
    assert (state.opt_state if kind == UNROLLED else state.opt_state.outer).count == 1


@pytest.mark.parametrize("kind", [UNROLLED, WALK])
def test_gradients_of_micro_batches_are_summed_in_float32(kind: str) -> None:
    """256 micro-batches: a bfloat16 sum would stop growing."""
    stack = LayerStack(lambda o, b: b[:, None], lambda p, x: x * p, lambda o, x, b: x.mean().astype(jnp.float32))
    data, tx = jnp.asarray([1.0] + [1 / 512] * 255, jnp.bfloat16), optax.sgd(1.0)
    params = {"outer": {}, "layers": jnp.ones((1,), jnp.bfloat16)}
    _, metrics = make(kind, stack, tx, microbatches=256)(start(kind, tx, params), data)
    np.testing.assert_allclose(metrics["grad_norm"], np.mean(np.asarray(data, np.float64)), rtol=2**-8)


@pytest.mark.parametrize(("value", "others"), [(jnp.nan, jnp.nan), (jnp.inf, 0.0)])
@pytest.mark.parametrize("kind", [UNROLLED, WALK])
def test_a_gradient_that_is_not_finite_propagates_through_clipping(kind: str, value: float, others: float) -> None:
    stack = LayerStack(lambda o, b: b, lambda p, x: x * p, lambda o, x, b: jnp.sum(x))
    tx, params = optax.sgd(1.0), {"outer": {}, "layers": jnp.ones((1, 2))}
    state, metrics = make(kind, stack, tx, max_norm=1.0)(start(kind, tx, params), jnp.asarray([1.0, value]))
    np.testing.assert_array_equal(state.params["layers"], [[1 - others if others == others else jnp.nan, jnp.nan]])
    np.testing.assert_array_equal(metrics["grad_norm"], value)
    assert not metrics["skipped"]


@pytest.mark.parametrize("kind", STEPS)
def test_weakly_typed_parameters_compile_once(kind: str) -> None:
    params = parameters()
    params["outer"]["scale"] = jnp.asarray(1.3)
    assert params["outer"]["scale"].weak_type
    step, state = make(kind, STACK, TX), start(kind, TX, params)
    for _ in range(2):
        state, _ = step(state, batch())
    assert step.jitted._cache_size() == 1
