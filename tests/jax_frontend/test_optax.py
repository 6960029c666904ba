"""Optax composes these transforms as it does its own."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, float64, gradients, train, train_directly, tree
from tests.support.rules import ADAM_FAMILY

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.jax_frontend import (
    RuleState,
    RuleStateWithBetas,
    adam,
    adamw,
    init_train_state,
    make_update,
    scale_by_stable_adam,
    stable_adamw,
)
from penstock.jax_frontend.direct import apply_directly

WAYS = pytest.mark.parametrize("way", [train, train_directly])
CASES_AND_WAYS = pytest.mark.parametrize(
    ("rule", "dtype", "way"),
    [
        ("stable_adamw", "bfloat16", train),
        ("stable_adamw", "bfloat16", train_directly),
        ("stable_adamw", "float32", train_directly),
        ("adamw", "float32", train),
        ("adam", "float32", train_directly),
    ],
)
CASES = pytest.mark.parametrize(("rule", "dtype"), [("stable_adamw", "bfloat16"), *[(rule, "float32") for rule in TRANSFORMS]])


@CASES_AND_WAYS
def test_a_chain_equals_its_parts(rule, way, dtype) -> None:
    tx = TRANSFORMS[rule](1e-2)
    chained = optax.chain(optax.zero_nans(), optax.scale(2.0), tx)
    params, grads = tree(0, dtype), gradients(5, dtype)
    doubled = [jax.tree.map(lambda leaf: leaf * 2, gradient) for gradient in grads]
    assert_equal(way(chained, params, grads)[0], way(tx, params, doubled)[0])


@pytest.mark.parametrize("rule", ADAM_FAMILY)
def test_a_finite_gradient_is_an_ordinary_spike_however_large(rule) -> None:
    """1e20 in float32, whose square is infinite: it enters as 2^50, and moves a weight at most 1/sqrt(1-b2) steps."""
    params = {"weight": jnp.ones(8)}
    usual = {"weight": jnp.full(8, 1e-2)}
    grads = [usual, {"weight": usual["weight"].at[3].set(1e20)}, usual, usual]
    found, state = train_directly(TRANSFORMS[rule](1e-3), params, grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert (np.abs(np.asarray(found["weight"]) - 1) < len(grads) * 1e-3 / np.sqrt(1e-3)).all()


@CASES_AND_WAYS
def test_masked_and_partition_update_their_parameters_only(rule, way, dtype) -> None:
    params, grads = tree(0, dtype), gradients(5, dtype)
    mine = {"matrix": True, "scalar": False, "empty": True, "none": None}
    alone = {name: params[name] for name in ("matrix", "empty")}
    tx = TRANSFORMS[rule](1e-2, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    expected, _ = way(tx, alone, [{name: gradient[name] for name in alone} for gradient in grads])
    rest = jax.tree.map(lambda applies: not applies, mine)
    masked = optax.chain(optax.masked(tx, mine), optax.masked(optax.set_to_zero(), rest))
    labels = jax.tree.map(lambda applies: "mine" if applies else "rest", mine)
    parted = optax.partition({"mine": tx, "rest": optax.sgd(1e-2)}, labels)
    for combined in (masked, parted):
        after, _ = way(combined, params, grads)
        assert_close({name: after[name] for name in alone}, expected, rtol=3e-7, atol=1e-8)
        assert (after["scalar"] == params["scalar"]) == (combined is masked)


@WAYS
def test_a_mask_tree_under_partition_applies_by_parameter(way) -> None:
    params, grads = {"a": jnp.ones(3), "b": jnp.ones(3)}, [{"a": jnp.zeros(3), "b": jnp.zeros(3)}]
    tx = adamw(1.0, weight_decay=0.1, mask={"a": True, "b": False})
    after, _ = way(optax.partition({"x": tx, "y": tx}, {"a": "x", "b": "y"}), params, grads)
    assert_close(after, {"a": jnp.full(3, 0.9), "b": jnp.ones(3)}, rtol=1e-6)


@CASES_AND_WAYS
def test_injected_hyperparameters_equal_plain_ones(rule, way, dtype) -> None:
    params, grads = tree(0, dtype), gradients(6, dtype)
    schedule = optax.linear_schedule(1e-2, 1e-3, 6)
    options = {"nu_dtype": "float32"}
    injected = optax.inject_hyperparams(TRANSFORMS[rule], hyperparam_dtype=jnp.float32)(schedule, weight_decay=0.1, **options)
    plain = TRANSFORMS[rule](schedule, weight_decay=0.1, **options)
    after, state = way(injected, params, grads)
    assert_close(after, way(plain, params, grads)[0], rtol=1e-5 if dtype == "float32" else 2**-7, atol=1e-6)
    assert state.hyperparams["b1"].dtype == jnp.float32


def _of_step(values: list[float]) -> Any:
    return lambda count: jnp.asarray(values)[count % len(values)]


BETAS = {"b1": _of_step([0.95, 0.9, 0.85, 0.85, 0.0, 0.5, 0.99]), "b2": _of_step([0.99, 0.9, 0.9, 0.95])}
CHANGING_STEPS = 30


@pytest.mark.parametrize(
    ("rule", "dtype", "way"), [("adamw", "float32", train), ("adam", "float32", train_directly), ("adamw", "float64", train)]
)
def test_betas_that_change_give_optaxs_numbers(rule, dtype, way) -> None:
    """Step n moves by lr*u, |u| <= 8; m and v lose at most 32 roundings a step (the new beta's ratio 12, the correction 12,
    the update 8) of their own magnitude, here and there: u is off by 2*32*n roundings, on either side; each sum rounds once."""
    with float64() if dtype == "float64" else contextlib.nullcontext():
        start = {"w": jnp.asarray(np.random.default_rng(0).normal(size=7), dtype)}
        grads = [{"w": jnp.asarray(np.random.default_rng(n).normal(size=7), dtype)} for n in range(1, CHANGING_STEPS + 1)]
        rate, n = 1e-2, CHANGING_STEPS

        def run(make: Any, way: Any) -> Any:
            return way(optax.inject_hyperparams(make)(rate, **BETAS, weight_decay=0.0), start, grads)

        expected = run(optax.adamw, train)[0]["w"]
        found, state = run(TRANSFORMS[rule], way)
    bound = (
        2 * float(jnp.finfo(dtype).eps) / 2 * (rate * 8 * 2 * 32 * n * (n + 1) / 2 + n * (np.abs(expected).max() + n * rate))
    )
    assert np.abs(np.asarray(found["w"]) - np.asarray(expected)).max() <= bound
    assert isinstance(state.inner_state, RuleStateWithBetas)


def test_constant_betas_keep_the_state_and_compute_nothing(monkeypatch) -> None:
    monkeypatch.setattr("penstock.core.update.rebiased", None)
    params = tree(0)
    for make in TRANSFORMS.values():
        _, state = train(make(optax.linear_schedule(1e-2, 1e-3, 6)), params, gradients(1))
        assert type(state) is RuleState


def test_betas_may_be_arrays_of_a_jitted_step_and_the_state_is_donated() -> None:
    """A transform made inside the step equals the injected one; a donated state has every array once."""
    params, grads = {"w": jnp.linspace(-1.0, 1.0, 5)}, {"w": jnp.linspace(1.0, 2.0, 5)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, b1: Any) -> Any:
        updates, state = adamw(1e-2, b1=b1).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    first = jax.tree.map(jnp.copy, params), adamw(1e-2, b1=jnp.asarray(0.9)).init(params)
    for number in range(6):
        first = step(*first, BETAS["b1"](number))
    injected = optax.inject_hyperparams(adamw)(1e-2, b1=BETAS["b1"])
    second, _ = train_directly(injected, params, [grads] * 6)
    assert_close(first[0], second, rtol=1e-6)
    constant = adamw(1e-2)
    with pytest.raises(InvalidArgumentError, match=r"b1 or b2 is an array, .* the state is a RuleState of constant ones"):
        step(jax.tree.map(jnp.copy, params), constant.init(params), jnp.asarray(0.9))


def test_injected_decoupled_decay_equals_the_plain_one() -> None:
    params, grads = tree(0), gradients(3)
    options = {"weight_decay": 1e-4, "decouple_lr": True, "max_lr": 0.02}
    injected = optax.inject_hyperparams(stable_adamw)(1e-2, **options)
    assert_close(train(injected, params, grads)[0], train(stable_adamw(1e-2, **options), params, grads)[0], rtol=1e-6)


@CASES_AND_WAYS
def test_multi_steps_equal_summed_gradients(rule, way, dtype) -> None:
    params, grads = tree(0, dtype), gradients(6, dtype)
    tx = TRANSFORMS[rule](1e-2)
    steps = optax.MultiSteps(tx, every_k_schedule=2, use_grad_mean=False)
    summed = [jax.tree.map(jnp.add, *grads[i : i + 2]) for i in (0, 2, 4)]
    assert_close(way(steps, params, grads)[0], train(tx, params, summed)[0], rtol=1e-6 if dtype == "float32" else 2**-7)


@CASES_AND_WAYS
def test_apply_if_finite_skips_only_what_is_not_finite(rule, way, dtype) -> None:
    params, grads = tree(0, dtype), gradients(4, dtype)
    tx = TRANSFORMS[rule](1e-2)
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, grads[0])
    after, state = way(optax.apply_if_finite(tx, 3), params, [grads[0], bad, *grads[1:]])
    expected, expected_state = train(tx, params, grads)
    assert_close(after, expected, rtol=1e-6 if dtype == "float32" else 2**-7)
    assert_close(
        state.inner_state.fields["exp_avg"],
        expected_state.fields["exp_avg"],
        rtol=1e-6 if dtype == "float32" else 2**-6,
        atol=1e-6,
    )
    assert state.inner_state.count == len(grads)


@CASES
def test_lookahead_moves_halfway(rule, dtype) -> None:
    tx = optax.lookahead(TRANSFORMS[rule](1e-2, compensation="none"), sync_period=2, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(jnp.ones(4, dtype))
    grads = [optax.LookaheadParams(fast=jnp.full(4, 0.1, dtype), slow=jnp.zeros(4, dtype))] * 2
    state = tx.init(both)
    for gradient in grads:
        updates, state = tx.update(gradient.fast, state, both)
        both = optax.apply_updates(both, updates)
    assert both.fast.dtype == jnp.dtype(dtype)
    plain, _ = train(TRANSFORMS[rule](1e-2, compensation="none"), jnp.ones(4, dtype), [g.fast for g in grads])
    halfway = (1 + np.asarray(plain, np.float32)) / 2
    np.testing.assert_allclose(np.asarray(both.fast, np.float32), halfway, rtol=1e-6 if dtype == "float32" else 2**-7)
    assert_close(both.fast, both.slow, rtol=1e-7 if dtype == "float32" else 2**-7)


def test_compensation_under_lookahead_is_refused_where_the_update_is_applied() -> None:
    tx = optax.lookahead(stable_adamw(1e-2), sync_period=2, slow_step_size=0.5)
    fast, slow = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    both = optax.LookaheadParams(fast, slow)
    with pytest.raises(RefusedError, match="compensation='none'"):
        make_update(tx)(jnp.ones(4, jnp.bfloat16), tx.init(both), both)


def test_compensation_under_schedule_free_is_refused_where_the_update_is_applied() -> None:
    params, gradient = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    refused, plain = (
        optax.contrib.schedule_free(stable_adamw(1e-2, b1=0.0, compensation=compensation), learning_rate=1e-2)
        for compensation in ("auto", "none")
    )
    with pytest.raises(RefusedError, match=r"schedule_free.*compensation='none'"):
        make_update(refused)(gradient, jax.tree.map(jnp.copy, refused.init(params)), params)
    make_update(plain)(gradient, jax.tree.map(jnp.copy, plain.init(params)), params)


@pytest.mark.parametrize(("rule", "way"), list(zip(ADAM_FAMILY, (train_directly, train, train_directly), strict=True)))
def test_schedule_free_converges(rule, way) -> None:
    base = TRANSFORMS[rule](5e-2, b1=0.0, weight_decay=0.0)
    tx = optax.contrib.schedule_free(base, learning_rate=5e-2, b1=0.9)
    target = jnp.asarray([1.0, -1.0, 0.5, 0.0])

    @jax.jit
    def trained(params):
        def body(_, carry):
            params, state = carry
            if way is train_directly:
                return apply_directly(tx, params - target, state, params)
            updates, state = tx.update(params - target, state, params)
            return optax.apply_updates(params, updates), state

        params, state = jax.lax.fori_loop(0, 300, body, (params, tx.init(params)))
        return optax.contrib.schedule_free_eval_params(state, params)

    np.testing.assert_allclose(trained(jnp.zeros(4)), target, atol=0.05)


@pytest.mark.parametrize("field", ["mu", "nu"])
def test_debiased_moments_are_not_found_under_the_names_of_biased_ones(field) -> None:
    """Code that reads Optax's mu and nu divides them by 1-b^t, which would correct these a second time."""
    for layered in (False, True):
        params = {"outer": {"w": jnp.ones(2)}, "layers": {"w": jnp.ones((2, 3))}}
        assert optax.tree_utils.tree_get(init_train_state(adamw(1e-3), params, layered=layered), field) is None


@CASES
def test_tree_map_params_finds_the_fields_like_parameters(rule, dtype) -> None:
    params = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones(2, dtype)}
    state = TRANSFORMS[rule](1e-3).init(params)
    specs = {"w": "spec of w", "b": "spec of b"}
    mapped = optax.tree_map_params(TRANSFORMS[rule](1e-3), lambda _, spec: spec, state, specs)
    assert all(field == specs for field in mapped.fields.values())
    assert mapped.count == 0


@pytest.mark.parametrize("make", [stable_adamw, adamw, adam])
def test_arguments_after_eps_are_given_by_name(make) -> None:
    """optax.adamw's fifth argument is another one: by position it would be taken for weight_decay."""
    make(1e-3, 0.9, 0.99, 1e-8)
    with pytest.raises(TypeError, match="positional"):
        make(1e-3, 0.9, 0.99, 1e-8, 0.0)


def test_arguments_after_eps_of_the_scaling_are_given_by_name() -> None:
    scale_by_stable_adam(0.9, 0.99, 1e-8)
    with pytest.raises(TypeError, match="positional"):
        scale_by_stable_adam(0.9, 0.99, 1e-8, None)


def test_one_transform_over_labels_is_each_rule_alone() -> None:
    """With one norm for all, one state and one jitted update."""
    params, grads = tree(1, "bfloat16"), gradients(5, "bfloat16")
    rules = {"adamw": TRANSFORMS["adamw"](1e-2), "sgd": TRANSFORMS["sgd_momentum"](1e-2), "lion": TRANSFORMS["lion"](1e-3)}
    labels = {"matrix": "adamw", "scalar": "sgd", "empty": "lion", "none": None}
    clip = optax.clip_by_global_norm(0.5)
    found, _ = train_directly(optax.chain(clip, optax.partition(rules, labels)), params, grads)
    clipped = [clip.update(gradient, clip.init(params))[0] for gradient in grads]
    for name, rule in (("matrix", "adamw"), ("scalar", "sgd"), ("empty", "lion")):
        alone, _ = train_directly(rules[rule], params[name], [gradient[name] for gradient in clipped])
        assert_equal(found[name], alone)
