"""Laws of compensation: no bit of a low-precision parameter is lost, through make_update and through Optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import (
    TRANSFORMS,
    assert_close,
    assert_equal,
    scanned,
    scanned_over,
    train,
    train_directly,
    tree,
)
from tests.support.rows import covering

from penstock.core import compensation as compensations
from penstock.core.array_ops import numpy_ops
from penstock.core.compensation import Stored
from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.jax_frontend import CompensatedState, adamw, compensated, make_update, stable_adamw
from penstock.jax_frontend.array_ops import jax_ops
from penstock.jax_frontend.compensation import residual, step
from penstock.jax_frontend.direct import as_transformation

MODES = [("bfloat16", "split"), ("bfloat16", "kahan"), ("float16", "kahan")]


def value(dtype: str, compensation: str, parameter, kept) -> np.ndarray:
    """The number that a parameter and its compensation stand for."""
    stored = Stored(np.asarray(parameter), np.asarray(kept))
    return compensations.load(numpy_ops, compensations.resolve(compensation, dtype), stored)


@pytest.mark.parametrize(
    ("rule", "compensation", "direct"), covering(["stable_adamw", "adamw"], ["auto", "split", "kahan"], [False, True])
)
def test_small_decay_is_not_lost(rule, compensation, direct) -> None:
    params, gradient = jnp.ones(16, jnp.bfloat16), jnp.full(16, 1e-30, jnp.bfloat16)
    tx = TRANSFORMS[rule](1e-4, eps=1e-6, weight_decay=0.1, compensation=compensation)
    params, state = scanned(tx, params, gradient, 2000, direct)
    atol = 4e-3 if compensation == "kahan" else 1e-3  # a bfloat16 k rounds each 1e-5 by up to a fifth
    np.testing.assert_allclose(value("bfloat16", compensation, params, state.compensation), 0.9802, atol=atol)
    np.testing.assert_allclose(np.asarray(params, np.float32), 0.9802, atol=6e-3)


@pytest.mark.parametrize("direct", [False, True])
def test_small_decay_is_lost_without_compensation(direct) -> None:
    tx = adamw(1e-4, eps=1e-6, weight_decay=0.1, compensation="none")
    params, _ = scanned(tx, jnp.ones(16, jnp.bfloat16), jnp.full(16, 1e-30, jnp.bfloat16), 2000, direct)
    np.testing.assert_array_equal(np.asarray(params, np.float32), 1.0)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("compensation", ["split", "kahan"])
def test_any_transform_can_be_compensated(compensation, direct) -> None:
    for inner in (optax.adamw(1e-4, eps=1e-6, weight_decay=0.1), adamw(1e-4, weight_decay=0.1, compensation="none")):
        tx = compensated(inner, compensation)
        gradient = jnp.zeros(16, jnp.bfloat16)
        params, state = scanned(tx, jnp.ones(16, jnp.bfloat16), gradient, 2000, direct)
        atol = 4e-3 if compensation == "kahan" else 1e-3
        np.testing.assert_allclose(value("bfloat16", compensation, params, state.compensation), 0.9802, atol=atol)


@pytest.mark.parametrize("direct", [False, True])
def test_split_is_the_float32_trajectory(direct) -> None:
    generator = np.random.default_rng(0)
    grads = jnp.asarray(generator.normal(size=(300, 64)), jnp.bfloat16)
    start = jnp.asarray(1 + 0.2 * generator.normal(size=64), jnp.bfloat16)
    options = {"mu_dtype": "float32", "nu_dtype": "float32"}
    low, state = scanned_over(adamw(1e-4, **options), start, grads, direct)
    high, _ = scanned_over(adamw(1e-4, **options), start.astype("float32"), grads.astype("float32"), direct)
    np.testing.assert_allclose(value("bfloat16", "split", low, state.compensation), high, rtol=3e-7)


def test_split_applied_directly_is_exact_beyond_a_factor_of_two() -> None:
    generator = np.random.default_rng(0)
    grads = jnp.asarray(generator.normal(size=(100, 64)), jnp.bfloat16)
    start = jnp.asarray(1e-3 * generator.normal(size=64), jnp.bfloat16)  # every step is ten times a parameter
    tx = adamw(1e-2, mu_dtype="float32", nu_dtype="float32")
    high, _ = scanned_over(tx, start.astype("float32"), grads.astype("float32"), True)
    errors = []
    for direct in (True, False):
        low, state = scanned_over(tx, start, grads, direct)
        errors.append(np.max(np.abs(value("bfloat16", "split", low, state.compensation) - high)))
    assert errors[0] <= 1e-7
    assert 1e-6 <= errors[1] <= 1e-3  # added as increments: exact only most of the time


def moves(seed: int, count: int, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and what is added to them: p'/p between low and high."""
    generator = np.random.default_rng(seed)
    p = generator.normal(size=count) * 10.0 ** generator.uniform(-2, 2, size=count)
    return p.astype(np.float32), (p * (generator.uniform(low, high, size=count) - 1)).astype(np.float32)


@pytest.mark.parametrize(("dtype", "compensation"), MODES)
def test_the_increment_leads_to_the_exact_parameter_within_a_factor_of_two(dtype, compensation) -> None:
    wide, added = moves(1, 20_000, 0.51, 1.99)
    stored = compensations.store(jax_ops, compensation, jnp.asarray(wide), dtype)
    exact = compensations.load(jax_ops, compensation, stored)
    stepped = jax.jit(lambda *a: step(compensation, *a, direct=False))(stored.parameter, exact, added)
    directly = jax.jit(lambda *a: step(compensation, *a, direct=True))(stored.parameter, exact, added)
    assert stepped.increment.dtype == stored.parameter.dtype
    assert_equal(optax.apply_updates(stored.parameter, stepped.increment), directly.parameter)
    assert_equal(stepped.compensation, directly.compensation)
    expected = compensations.store(numpy_ops, compensation, np.asarray(exact) + added, dtype)
    assert_equal(directly.parameter, expected.parameter)
    assert_equal(directly.compensation, expected.compensation)


@pytest.mark.parametrize(("dtype", "compensation"), MODES)
def test_an_increment_beyond_a_factor_of_two_saturates_within_a_spacing(dtype, compensation) -> None:
    wide, added = moves(2, 20_000, -5.0, 5.0)
    stored = compensations.store(jax_ops, compensation, jnp.asarray(wide), dtype)
    exact = compensations.load(jax_ops, compensation, stored)
    stepped = jax.jit(lambda *a: step(compensation, *a, direct=False))(stored.parameter, exact, added)
    reached = value(dtype, compensation, optax.apply_updates(stored.parameter, stepped.increment), stepped.compensation)
    target = np.asarray(exact, np.float64) + added
    spacing = 2.0 ** (-7 if dtype == "bfloat16" else -10) * np.maximum(np.abs(target), np.abs(wide)) * 4
    assert np.all(np.abs(reached - target) <= spacing)
    assert np.all(np.isfinite(reached))


@pytest.mark.parametrize(("dtype", "compensation"), MODES)
def test_a_compensation_never_increases_the_error(dtype, compensation) -> None:
    generator = np.random.default_rng(4)
    exact = (generator.normal(size=10_000) * 10.0 ** generator.uniform(-4, 2, size=10_000)).astype(np.float32)
    nearby = exact * generator.choice([1.0, 1.01, 0.5, -1.0, -0.01, 0.0, -0.0], size=exact.shape)
    reached = numpy_ops.cast(nearby.astype(np.float32), dtype)
    kept = jax_ops.cast(
        residual(compensation, exact, jnp.asarray(reached).astype("float32")),
        compensations.compensation_dtype(compensation, dtype),
    )
    with_it = value(dtype, compensation, reached, kept)
    assert np.all(np.abs(with_it - exact) <= np.abs(reached.astype(np.float32) - exact))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("compensation", ["split", "kahan"])
def test_a_parameter_crosses_zero(compensation, direct) -> None:
    params = jnp.asarray([0.0, -0.0, 1e-3, -1e-3, 1e-30, 3e-5], jnp.bfloat16)
    gradient = jnp.asarray([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], jnp.bfloat16)
    tx = adamw(1e-3, weight_decay=0.0, compensation=compensation)
    after, state = scanned(tx, params, gradient, 100, direct)
    expected = np.asarray(params, np.float32) - 0.1 * np.asarray(gradient, np.float32)
    np.testing.assert_allclose(value("bfloat16", compensation, after, state.compensation), expected, rtol=5e-3)


@pytest.mark.parametrize(("dtype", "compensation"), MODES)
@pytest.mark.parametrize("direct", [False, True])
def test_infinities_and_nans_propagate(dtype, compensation, direct) -> None:
    params = jnp.asarray([1.0, 1.0, -1.0, np.inf, 60000.0], dtype)
    added = jnp.asarray([np.nan, np.inf, -np.inf, 1.0, 3e38], jnp.float32)
    stepped = step(compensation, params, params.astype("float32"), added, direct=direct)
    after = stepped.parameter if direct else optax.apply_updates(params, stepped.increment)
    reached = value(dtype, compensation, after, stepped.compensation)
    np.testing.assert_array_equal(reached[:4], [np.nan, np.inf, -np.inf, np.inf])
    assert reached[4] > 6e4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_survives_the_compiler(dtype) -> None:
    generator = np.random.default_rng(3)
    x = (generator.normal(size=10_000) * 10.0 ** generator.uniform(-9, 4, size=10_000)).astype(np.float32)
    rounding = jax.jit(lambda x: jax_ops.round_to(x, dtype))
    assert "reduce_precision" in rounding.lower(x).as_text()  # not a pair of casts, which some compilers remove
    rounded = rounding(x)
    np.testing.assert_array_equal(rounded, numpy_ops.round_to(x, dtype))


@pytest.mark.parametrize("way", [train, train_directly])
def test_only_low_precision_is_compensated(way) -> None:
    params = {**tree(0), "low": jnp.ones(3, jnp.bfloat16), "half": jnp.ones(3, jnp.float16)}
    grads = [jax.tree.map(jnp.ones_like, params)]
    for tx in (stable_adamw(1e-4), compensated(optax.sgd(1e-4))):
        after, state = way(tx, params, grads)
        kept = state.compensation
        assert {name: leaf.dtype.name for name, leaf in kept.items() if leaf is not None} == {
            "low": "int16",
            "half": "float16",
        }
        assert jax.tree.map(lambda p: p.dtype, after) == jax.tree.map(lambda p: p.dtype, params)


def test_integers_pass_through_compensated() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16), "n": jnp.arange(3)}
    tx = compensated(optax.identity())
    updates, state = tx.update({"w": params["w"], "n": jnp.ones(3, int)}, tx.init(params), params)
    assert isinstance(state, CompensatedState)
    assert_equal(optax.apply_updates(params, updates), {"w": params["w"] * 2, "n": jnp.arange(1, 4)})


def test_a_compensation_that_is_not_possible_is_refused() -> None:
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(InvalidArgumentError, match="compensates its updates itself"):
        compensated(stable_adamw(1e-3)).init(params)
    with pytest.raises(InvalidArgumentError, match="compensates its updates itself"):
        compensated(compensated(optax.sgd(1e-3))).init(params)
    with pytest.raises(InvalidArgumentError, match="compensation='lots'"):
        compensated(optax.sgd(1e-3), "lots")
    with pytest.raises(InvalidArgumentError, match="compensation='lots'"):
        adamw(1e-3, compensation="lots")
    with pytest.raises(InvalidArgumentError, match="float16"):
        stable_adamw(1e-3, compensation="split").init(params.astype("float16"))
    tx = compensated(optax.sgd(1e-3))
    with pytest.raises(InvalidArgumentError, match="needs the parameters"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize("tx", [stable_adamw(1e-3), compensated(optax.sgd(1e-3))])
def test_a_later_transform_is_refused_where_the_update_is_applied(tx) -> None:
    chained = optax.chain(tx, optax.scale(0.5))
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(RefusedError, match="last"):
        make_update(chained)(jnp.ones_like(params), chained.init(params), params)
    after, _ = train_directly(chained, params.astype("float32"), [jnp.ones(3)])  # nothing compensated, nothing refused
    assert_close(after, train(chained, params.astype("float32"), [jnp.ones(3)])[0], rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_increment_given_to_another_parameter_is_added_there(dtype) -> None:
    """Its exact parameter is not taken: it is that of the parameter that the increment was computed for."""
    inner = adamw(1e-2, compensation="none")

    def swapped(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, state, params, **extra_args)
        return {"a": updates["b"], "b": updates["a"]}, state

    tx = optax.GradientTransformationExtraArgs(inner.init, swapped)
    params, grads = {"a": jnp.ones(3, dtype), "b": jnp.full(3, 5.0, dtype)}, {"a": jnp.ones(3, dtype), "b": -jnp.ones(3, dtype)}
    assert_equal(train_directly(tx, params, [grads])[0], train(tx, params, [grads])[0])


REFUSED = {
    "a chain around": optax.chain(optax.apply_if_finite(stable_adamw(1e-3), 3), optax.scale(0.5)),
    "a chain within": optax.MultiSteps(optax.chain(stable_adamw(1e-3), optax.scale(0.5)), 1),
    "another wrapper": optax.apply_if_finite(optax.contrib.schedule_free(stable_adamw(1e-3, b1=0.0), 1e-3), 3),
    "a group": optax.MultiSteps(
        optax.partition({"a": optax.chain(compensated(optax.sgd(1e-3)), optax.scale(0.5)), "b": optax.sgd(1e-3)}, "a"), 2
    ),
}
ALLOWED = {
    "apply_if_finite": (optax.apply_if_finite(stable_adamw(1e-3), 3), 1),
    "MultiSteps": (optax.MultiSteps(stable_adamw(1e-3), 2), 2),
    "a chain around": (optax.chain(optax.zero_nans(), optax.apply_if_finite(stable_adamw(1e-3), 3)), 1),
    "a chain within": (optax.MultiSteps(optax.chain(optax.zero_nans(), stable_adamw(1e-3)), 1), 1),
    "injected": (
        optax.apply_if_finite(optax.inject_hyperparams(stable_adamw, hyperparam_dtype=jnp.float32)(1e-3), 3),
        1,
    ),
    "a group": (optax.apply_if_finite(optax.partition({"a": stable_adamw(1e-3), "b": optax.sgd(1e-3)}, "a"), 3), 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_later_transform_under_a_deciding_wrapper_is_refused(name) -> None:
    tx = as_transformation(REFUSED[name])
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(RefusedError, match=r"must be the last.*apply_if_finite.*compensation='none'"):
        make_update(tx)(jnp.ones_like(params), tx.init(params), params)
    wide = jnp.ones(3)  # nothing compensated, nothing refused
    make_update(tx)(jnp.ones(3), jax.tree.map(jnp.copy, tx.init(wide)), wide)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_deciding_wrapper_loses_no_bits(name) -> None:
    tx, every = as_transformation(ALLOWED[name][0]), ALLOWED[name][1]
    expected, _ = train(stable_adamw(1e-3), jnp.ones(3), [jnp.ones(3)] * 20)
    reached, _ = train_directly(tx, jnp.ones(3, jnp.bfloat16), [jnp.ones(3, jnp.bfloat16)] * 20 * every)
    np.testing.assert_allclose(np.asarray(reached, np.float32), expected, rtol=2**-8)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("dtype", "compensation"), MODES)
def test_a_pruned_weight_trains_on_as_if_nothing_had_been_lost(dtype: str, compensation: str, direct: bool) -> None:
    """Where the user sets a weight to zero, its old remainder is ignored: the next steps are those of a remainder of zero."""
    tx = adamw(1e-3, compensation=compensation)
    update = make_update(tx) if direct else None
    keys = jax.random.split(jax.random.key(0), 6)
    params = jax.random.normal(keys[0], (64,)).astype(dtype)
    state = tx.init(params)

    def advance(params, state, key):
        grads = jax.random.normal(key, (64,)).astype(dtype)
        if update is not None:
            return update(grads, state, params)
        increments, state = tx.update(grads, state, params)
        return optax.apply_updates(params, increments), state

    for key in keys[1:3]:
        params, state = advance(params, state, key)
    pruned = jax.random.bernoulli(keys[5], 0.5, (64,))
    params = jnp.where(pruned, jnp.zeros_like(params), params)
    assert jnp.any(jnp.where(pruned, state.compensation, 0) != 0)
    other, cleared = jax.tree.map(jnp.copy, (params, state))
    cleared = cleared._replace(compensation=jnp.where(pruned, jnp.zeros_like(state.compensation), state.compensation))
    for key in keys[3:5]:
        params, state = advance(params, state, key)
        other, cleared = advance(other, cleared, key)
    assert jnp.isfinite(params.astype(jnp.float32)).all()
    assert jnp.array_equal(params, other)
