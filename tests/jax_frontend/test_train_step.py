"""make_train_step: the mean gradient of the whole batch, clipped exactly, applied once, in donated memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax_support import TRANSFORMS, assert_close, assert_equal, float64

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.jax_frontend import TrainState, init_train_state, make_train_step, make_update, stable_adamw

WIDTH, LAYERS, BATCH = 6, 3, 8


def model(dtype: str = "float32", width: int = WIDTH, layers: int = LAYERS) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(width, width)) / width**0.5, dtype) for _ in range(layers)]


def batch(dtype: str = "float32", width: int = WIDTH) -> dict[str, jax.Array]:
    generator = np.random.default_rng(1)
    mask = jnp.asarray(generator.random(BATCH) < 0.6)
    return {"x": jnp.asarray(generator.normal(size=(BATCH, width)), dtype), "mask": mask}


def each_loss(params, batch) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer)
    return jnp.sum(x**2, axis=-1)


def mean_loss(params, batch) -> jax.Array:
    return jnp.mean(each_loss(params, batch))


def masked_loss(params, batch) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(each_loss(params, batch) * batch["mask"]), jnp.sum(batch["mask"])


def plain_step(loss, tx, params, state, data, max_norm=None):
    value, grads = jax.value_and_grad(loss)(params, data)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    if max_norm is not None:
        grads, _ = optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, norm


@pytest.mark.parametrize("max_norm", [None, 0.05, 1e6])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("loss", ["mean", "sum and weight"])
def test_equals_the_plain_step_in_float64(loss, microbatches, max_norm) -> None:
    with float64():
        params, data, tx = model("float64"), batch("float64"), stable_adamw(1e-2)
        given, plain = {
            "mean": (mean_loss, mean_loss),
            "sum and weight": (masked_loss, lambda p, b: jnp.divide(*masked_loss(p, b))),
        }[loss]
        step = make_train_step(given, tx, microbatches=microbatches, max_norm=max_norm)
        state, expected, expected_state = init_train_state(tx, params), params, tx.init(params)
        for _ in range(3):
            state, metrics = step(state, data)
            expected, expected_state, value, norm = plain_step(plain, tx, expected, expected_state, data, max_norm)
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
            assert not metrics["skipped"]
        assert_close(state, TrainState(expected, expected_state), rtol=1e-11, atol=1e-13)
        assert all(metrics[name].shape == () for name in ("loss", "grad_norm", "skipped"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", TRANSFORMS)
def test_it_learns_donates_and_compiles_once(rule, dtype) -> None:
    params, data, tx = model(dtype), batch(dtype), TRANSFORMS[rule](optax.linear_schedule(3e-2, 0.0, 30))
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return mean_loss(params, batch)

    step, state, losses = make_train_step(counted, tx, max_norm=1.0), init_train_state(tx, params), []
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    for _ in range(20):
        given = jax.tree.leaves(state)
        state, metrics = step(state, data)
        assert all(leaf.is_deleted() for leaf in given)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert traces == 1
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    assert not any(leaf.is_deleted() for leaf in params)


def test_state_is_aliased_and_gradients_are_released() -> None:
    width, layers = 256, 8
    params, data, tx = model(width=width, layers=layers), batch(width=width), stable_adamw(1e-3)
    state = init_train_state(tx, params)
    analysis = make_train_step(mean_loss, tx).lower(state, data).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in params)
    assert analysis.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    # Parameters and two moments are 3; all gradients at once would make it 4.
    assert (peak - analysis.alias_size_in_bytes) / size < 3.6


def test_gradients_are_summed_in_float32() -> None:
    params, data = jnp.ones(4, jnp.bfloat16), jnp.asarray([1.0] + [1 / 512] * 255, jnp.bfloat16)
    tx = optax.sgd(1.0)
    step = make_train_step(lambda p, b: jnp.sum(p) * jnp.mean(b), tx, microbatches=256)
    _, metrics = step(init_train_state(tx, params), data)
    np.testing.assert_allclose(metrics["grad_norm"], 2 * np.mean(np.asarray(data, np.float64)), rtol=2**-8)


def test_no_weight_at_all_skips_the_update() -> None:
    params, data, tx = model(), batch(), stable_adamw(1e-2)
    step, state = make_train_step(masked_loss, tx, microbatches=2), init_train_state(tx, params)
    before = jax.tree.map(jnp.copy, state)
    state, metrics = step(state, {**data, "mask": jnp.zeros(BATCH, bool)})
    assert metrics["skipped"]
    assert_equal(state, before)
    state, metrics = step(state, data)
    assert not metrics["skipped"]
    assert state.opt_state.count == 1


@pytest.mark.parametrize("weight", [jnp.nan, -1.0])
def test_a_weight_that_is_not_positive_skips_the_update(weight) -> None:
    params, tx = jnp.ones(3), stable_adamw(1e-2)
    state, metrics = make_train_step(lambda p, b: (jnp.sum(p * b), weight), tx)(init_train_state(tx, params), jnp.ones(3))
    assert metrics["skipped"]
    assert_equal(state, init_train_state(tx, params))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("weight", [1e-2, 3.0, 5e4, 1e6])
def test_the_sum_of_a_float16_loss_may_overflow(weight, microbatches) -> None:
    tx, size = optax.sgd(1.0), 6e4 * min(weight / 5e4, 1.0)
    data = jnp.full((2, 3), size, jnp.float16)
    step = make_train_step(lambda p, b: (jnp.sum(2 * p * b), weight / microbatches), tx, microbatches=microbatches)
    state, metrics = step(init_train_state(tx, jnp.zeros(3, jnp.float16)), data)
    expected = 4 * size / weight
    np.testing.assert_allclose(np.asarray(state.params, np.float32), -expected, rtol=2e-3)
    np.testing.assert_allclose(metrics["grad_norm"], 3**0.5 * expected, rtol=2e-3)


@pytest.mark.parametrize("size", [1e25, 3.0, 1e-15])
def test_clipping_does_not_overflow(size) -> None:
    tx, data = optax.sgd(1.0), jnp.asarray([3.0, 4.0]) * size
    step = make_train_step(lambda p, b: jnp.sum(p["a"] * b[0] + p["b"] * b[1]), tx, max_norm=size)
    state, metrics = step(init_train_state(tx, {"a": jnp.zeros(()), "b": jnp.zeros(1)}), data)
    np.testing.assert_allclose(metrics["grad_norm"], 5 * size, rtol=1e-6)
    assert_close(state.params, {"a": jnp.asarray(-0.6 * size), "b": jnp.asarray([-0.8 * size])}, rtol=1e-6)
    none = make_train_step(lambda p, b: 0.0 * jnp.sum(p), tx, max_norm=1.0)(init_train_state(tx, jnp.ones(3)), data)
    assert_equal((none[0].params, none[1]["grad_norm"]), (jnp.ones(3), jnp.zeros(())))


@pytest.mark.parametrize(("value", "others"), [(jnp.nan, jnp.nan), (jnp.inf, 0.0)])
def test_clipping_lets_through_what_is_not_finite(value, others) -> None:
    tx = optax.sgd(1.0)
    step = make_train_step(lambda p, b: jnp.sum(p * b), tx, max_norm=1.0)
    state, metrics = step(init_train_state(tx, jnp.zeros(2)), jnp.asarray([1.0, value]))
    np.testing.assert_array_equal(state.params, [others, jnp.nan])
    np.testing.assert_array_equal(metrics["grad_norm"], value)


def test_weakly_typed_parameters_compile_once() -> None:
    tx = stable_adamw(1e-2)
    state, step = init_train_state(tx, jnp.asarray(1.0)), make_train_step(lambda p, b: p * b, tx)
    for _ in range(3):
        state, _ = step(state, jnp.ones(()))
    assert step.jitted._cache_size() == 1


@pytest.mark.parametrize("tx", [stable_adamw(1e-2), optax.contrib.schedule_free_sgd(), optax.adam(1e-2)])
def test_the_state_owns_its_memory(tx) -> None:
    params = model()
    state = init_train_state(tx, params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(pointers) == len(set(pointers))
    make_train_step(mean_loss, tx)(state, batch())
    assert not any(leaf.is_deleted() for leaf in params)


def test_parameters_shared_with_the_state_are_copied() -> None:
    averaging = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    state = init_train_state(averaging, model())
    make_train_step(mean_loss, averaging)(state, batch())  # donating a buffer twice would be an error


def test_mistakes_are_named() -> None:
    tx, params = stable_adamw(1e-2), model()
    state = init_train_state(tx, params)
    with pytest.raises(InvalidArgumentError, match=r"microbatches=3 does not divide.*\['mask'\].*\(8,\)"):
        make_train_step(mean_loss, tx, microbatches=3)(state, batch())
    with pytest.raises(InvalidArgumentError, match=r"\['mask'\] has 4 rows .*belong together"):
        make_train_step(mean_loss, tx, microbatches=2)(state, {**batch(), "mask": batch()["mask"][:4]})
    make_train_step(mean_loss, tx, microbatches=2)(state, {**batch(), "one row for each": jnp.ones((2, 3))})
    state = init_train_state(tx, params)
    with pytest.raises(InvalidArgumentError, match=r"shape \(8,\); it must return a scalar"):
        make_train_step(each_loss, tx)(state, batch())
    with pytest.raises(InvalidArgumentError, match="must return a scalar"):
        make_train_step(lambda p, b: {"loss": mean_loss(p, b)}, tx)(state, batch())
    with pytest.raises(InvalidArgumentError, match="must return a scalar"):
        make_train_step(lambda p, b: (mean_loss(p, b), 1, 2), tx)(state, batch())
    with pytest.raises(InvalidArgumentError, match="dtype int32"):
        make_train_step(lambda p, b: jnp.sum(b["mask"]), tx)(state, batch())
    with pytest.raises(UnsupportedTensorError, match=r"params\['n'\] has dtype int32"):
        make_train_step(mean_loss, optax.sgd(1e-2))(init_train_state(optax.sgd(1e-2), {"n": jnp.arange(3)}), batch())
    with pytest.raises(InvalidArgumentError, match=r"not one of this transform.*init_train_state"):
        make_train_step(mean_loss, optax.sgd(1e-2))(state, batch())
    for wrong in (None, stable_adamw):
        for build in (
            lambda wrong: make_train_step(mean_loss, wrong),
            make_update,
            lambda wrong: init_train_state(wrong, params),
        ):
            with pytest.raises(InvalidArgumentError, match=r"tx=.* is not an Optax transform"):
                build(wrong)
    for value in (0, -1, 1.5, True, "two"):
        with pytest.raises(InvalidArgumentError, match="microbatches"):
            make_train_step(mean_loss, tx, microbatches=value)
    for value in (0.0, -1.0, float("nan"), "one"):
        with pytest.raises(InvalidArgumentError, match="max_norm"):
            make_train_step(mean_loss, tx, max_norm=value)
    chained = optax.chain(tx, optax.scale(0.5))
    with pytest.raises(RefusedError, match="last"):
        make_train_step(mean_loss, chained)(init_train_state(chained, model("bfloat16")), batch("bfloat16"))
