"""Laws of every rule: equal to Optax and to the float64 reference, and to its formula in every dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import (
    DTYPES,
    TRANSFORMS,
    assert_close,
    assert_equal,
    float64,
    gradients,
    scanned_over,
    train,
    train_directly,
    tree,
)
from tests.support.rules import ADAM_FAMILY, reference_settings

from penstock.core.debiasing import corrected_one_minus_beta
from penstock.core.reference import EndOfStep, Gradient, Reference, Settings
from penstock.core.rules import RULES
from penstock.jax_frontend import adam, adamw, scale_by_stable_adam, stable_adamw

STEPS = 50
MASK = {"matrix": True, "scalar": False, "empty": True, "none": None}


def reference(rule: str, params, grads, lr, **changed) -> dict[str, np.ndarray]:
    run = Reference(
        reference_settings(RULES[rule], lr, **changed), {name: leaf for name, leaf in params.items() if leaf is not None}
    )
    for gradient in grads:
        for name in run.tensors:
            run.run(Gradient(name, np.asarray(gradient[name], np.float64)))
        run.run(EndOfStep())
    return {name: tensor.parameter for name, tensor in run.tensors.items()}


def assert_equals_reference(params, expected, rtol) -> None:
    for name, leaf in expected.items():
        np.testing.assert_allclose(np.asarray(params[name], np.float64), leaf, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("mask", [None, MASK, lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)])
def test_adamw_equals_optax_in_float64(mask) -> None:
    with float64():
        params, grads = tree(0, "float64"), gradients(STEPS, "float64")
        ours, _ = train(adamw(1e-2, weight_decay=0.1, mask=mask), params, grads)
        theirs, _ = train(optax.adamw(1e-2, weight_decay=0.1, mask=mask), params, grads)
        assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", [None, MASK])
def test_adam_equals_optax_in_float64(mask) -> None:
    with float64():
        params, grads = tree(0, "float64"), gradients(STEPS, "float64")
        ours, _ = train(adam(1e-2, weight_decay=0.1, mask=mask), params, grads)
        theirs, _ = train(optax.chain(optax.add_decayed_weights(0.1, mask), optax.adam(1e-2)), params, grads)
        assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("way", [train, train_directly])
@pytest.mark.parametrize("rule", TRANSFORMS)
def test_equals_the_reference_in_float64(rule, way) -> None:
    with float64():
        params, grads = tree(1, "float64"), gradients(STEPS, "float64")
        ours, state = way(TRANSFORMS[rule](1e-2, weight_decay=0.1), params, grads)
        assert_equals_reference(ours, reference(rule, params, grads, 1e-2, weight_decay=0.1), 1e-12)
        assert state.count == STEPS


@pytest.mark.parametrize("rule", ["stable_adamw", "adamw"])
def test_fully_decoupled_decay_equals_the_reference(rule) -> None:
    with float64():
        params, grads = tree(1, "float64"), gradients(STEPS, "float64")
        changed = {"weight_decay": 5e-4, "decouple_lr": True, "max_lr": 0.02}
        ours, _ = train(TRANSFORMS[rule](1e-2, **changed), params, grads)
        assert_equals_reference(ours, reference(rule, params, grads, 1e-2, **changed), 1e-12)


@pytest.mark.parametrize("rule", ADAM_FAMILY)
def test_a_schedule_is_evaluated_at_the_count_of_earlier_updates(rule) -> None:
    rates, decays = [1e-2, 3e-3, 5e-3, 0.0, 1e-3], [0.1, 0.0, 0.3, 0.2, 0.1]
    with float64():
        params, grads = tree(1, "float64"), gradients(5, "float64")
        tx = TRANSFORMS[rule](lambda count: jnp.asarray(rates)[count], weight_decay=lambda c: jnp.asarray(decays)[c])
        ours, _ = train(tx, params, grads)
        expected, state = params, TRANSFORMS[rule](0.0).init(params)
        for rate, decay, gradient in zip(rates, decays, grads, strict=True):
            updates, state = TRANSFORMS[rule](rate, weight_decay=decay).update(gradient, state, expected)
            expected = optax.apply_updates(expected, updates)
        assert_close(ours, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("rule", ["stable_adamw", "adamw"])
def test_float32_stays_near_float64_over_2000_steps(rule, direct) -> None:
    generator = np.random.default_rng(5)
    params = jnp.asarray(generator.choice([-1.0, 1.0], 512) + 0.1 * generator.normal(size=512), jnp.float32)
    grads = np.asarray(generator.normal(size=(2000, 512)), np.float32)
    ours, _ = scanned_over(TRANSFORMS[rule](1e-4, weight_decay=0.1), params, jnp.asarray(grads), direct)
    run = Reference(Settings(rule, 1e-4, ADAM_FAMILY[rule].betas, ADAM_FAMILY[rule].defaults["eps"], 0.1), {"p": params})
    for gradient in grads:
        run.run(Gradient("p", gradient))
    expected = run.tensors["p"].parameter
    error = np.linalg.norm(np.asarray(ours, np.float64) - expected) / np.linalg.norm(expected)
    assert error <= 1.5e-6


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999, 0.9999])
def test_a_bias_correction_of_a_traced_count_keeps_its_digits(beta) -> None:
    steps = jnp.arange(1, 2000, dtype=jnp.float32)
    traced = jax.jit(lambda step: corrected_one_minus_beta(beta, step, jnp))(steps)
    exact = [corrected_one_minus_beta(beta, step, np) for step in range(1, 2000)]
    np.testing.assert_allclose(traced, exact, rtol=5e-7)


def test_scale_by_stable_adam_in_a_chain_equals_stable_adamw() -> None:
    params, grads = tree(2), gradients(20)
    chained = optax.chain(
        scale_by_stable_adam(weight_decay=0.1, mask=MASK), optax.scale_by_learning_rate(lambda count: 1e-2 / (1 + count))
    )
    ours, state = train(chained, params, grads)
    expected, expected_state = train(stable_adamw(lambda count: 1e-2 / (1 + count), weight_decay=0.1, mask=MASK), params, grads)
    assert_close(ours, expected, rtol=2e-6, atol=1e-7)
    assert_equal(state[0].fields["exp_avg_sq"], expected_state.fields["exp_avg_sq"])


@pytest.mark.parametrize("way", [train, train_directly])
@pytest.mark.parametrize("rule", ADAM_FAMILY)
def test_a_learning_rate_of_zero_freezes_the_parameters(rule, way) -> None:
    with float64():
        params = {dtype: tree(3, dtype)["matrix"] for dtype in DTYPES}
        grads = [{dtype: tree(seed, dtype)["matrix"] for dtype in DTYPES} for seed in (4, 5)]
        assert_equal(way(TRANSFORMS[rule](0.0), params, grads)[0], params)


@pytest.mark.parametrize("way", [train, train_directly])
def test_a_learning_rate_of_zero_freezes_after_training(way) -> None:
    params, grads = tree(3, "bfloat16")["matrix"], [tree(seed, "bfloat16")["matrix"] for seed in range(4, 10)]
    switched = stable_adamw(lambda count: jnp.where(count < 3, 1e-2, 0.0))
    assert_equal(way(switched, params, grads)[0], way(stable_adamw(1e-2), params, grads[:3])[0])
