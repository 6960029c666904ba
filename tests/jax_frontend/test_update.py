"""make_update equals tx.update and optax.apply_updates, and deletes what it is given."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, gradients, train, train_directly, tree

from penstock.jax_frontend import make_update, stable_adamw

CHAINS = {
    **{name: transform(1e-2) for name, transform in TRANSFORMS.items()},
    "chain": optax.chain(optax.clip_by_global_norm(1.0), stable_adamw(1e-2)),
    "optax.adamw": optax.adamw(1e-2),
}


def large(dtype: str, seed: int) -> dict[str, jax.Array]:
    generator = np.random.default_rng(seed)
    shapes = {"a": (256, 128), "b": (300,)}
    return {name: jnp.asarray(generator.normal(size=shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", CHAINS)
def test_equals_update_and_apply_updates(name) -> None:
    params, grads = tree(0), gradients(15)
    applied, state = train(CHAINS[name], params, grads)
    directly, direct_state = train_directly(CHAINS[name], params, grads)
    assert_close(directly, applied, rtol=2e-7, atol=1e-8)  # one contraction to fused multiply-add more or less
    assert_close(direct_state, state, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "compensation", "dtype"),
    [
        *[("stable_adamw", compensation, "bfloat16") for compensation in ("split", "kahan", "none")],
        *[("adamw", compensation, "float16") for compensation in ("kahan", "none")],
        ("adam", "auto", "bfloat16"),
    ],
)
def test_equals_update_and_apply_updates_in_low_precision(name, compensation, dtype) -> None:
    params, grads = large(dtype, 0), [large(dtype, seed) for seed in range(1, 4)]
    tx = TRANSFORMS[name](1e-4, compensation=compensation)
    applied, _ = train(tx, params, grads)
    directly, _ = train_directly(tx, params, grads)
    spacing = 2.0 ** (-7 if dtype == "bfloat16" else -10)
    assert_close(directly, applied, rtol=2 * spacing, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"), [*[(name, "float32") for name in CHAINS], ("chain", "bfloat16"), ("adamw", "float16")]
)
def test_gradients_state_and_parameters_are_donated(name, dtype) -> None:
    params, grads = large(dtype, 0), large(dtype, 1)
    state = CHAINS[name].init(params)
    given = jax.tree.leaves((grads, state, params))
    update = make_update(CHAINS[name])
    compiled = update.lower(grads, state, params).compile()  # "donated buffers were not usable" would be an error
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", compiled.as_text().split("\n")[0])
    kept = jax.tree.leaves((state, params))  # in their buffers; the gradients' are only read, and deleted after the call
    assert sorted(aliases) == sorted((str(i), str(len(given) - len(kept) + i)) for i in range(len(kept)))
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in kept)
    params, state = update(grads, state, params)
    assert all(leaf.is_deleted() for leaf in given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("name", ["adamw", "adam", "optax.adamw"])
def test_no_scratch_in_float32(name) -> None:
    params, grads = large("float32", 0), large("float32", 1)
    lowered = make_update(CHAINS[name]).lower(grads, CHAINS[name].init(params), params)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1024


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this XLA writes what several leaves need for all of them at once")
def test_update_clipping_takes_scratch_for_one_leaf_at_a_time() -> None:
    """Its mean square is of the gradient as it is: XLA would write a changed one to memory, for all leaves at once."""
    params = {str(leaf): jax.ShapeDtypeStruct((256, 256), jnp.float32) for leaf in range(4)}
    tx = stable_adamw(1e-2)
    lowered = make_update(tx).lower(params, jax.eval_shape(tx.init, params), params)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 256 * 256 * 4 + 1024


def test_gradients_of_another_dtype_are_donated_too() -> None:
    params, grads = large("bfloat16", 0), large("float32", 1)
    tx = stable_adamw(1e-2)
    update, state = make_update(tx), tx.init(params)
    before = jax.tree.map(lambda leaf: leaf.dtype, (params, state))
    params, state = update(grads, state, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(grads))
    assert jax.tree.map(lambda leaf: leaf.dtype, (params, state)) == before


@pytest.mark.parametrize("name", TRANSFORMS)
def test_init_does_not_alias_parameters(name) -> None:
    params = large("float32", 0)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    state = TRANSFORMS[name](1e-3).init(params)
    assert pointers.isdisjoint({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)})


def test_one_compilation_for_all_steps_and_rates() -> None:
    traces = 0

    def counted(learning_rate, weight_decay):
        tx = stable_adamw(learning_rate, weight_decay=weight_decay)

        def update(updates, state, params=None, **extra_args):
            nonlocal traces
            traces += 1
            return tx.update(updates, state, params, **extra_args)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    tx = optax.inject_hyperparams(counted)(learning_rate=1e-2, weight_decay=0.1)
    params = tree(0, "bfloat16")
    update, state = make_update(tx), tx.init(params)
    rates = [1e-2, 1e-3, 0.0, 1e-1]
    for rate, gradient in zip(rates, gradients(4, "bfloat16"), strict=True):
        state.hyperparams["learning_rate"] = jnp.asarray(rate, state.hyperparams["learning_rate"].dtype)
        state.hyperparams["weight_decay"] = jnp.asarray(rate / 10, state.hyperparams["weight_decay"].dtype)
        params, state = update(gradient, state, params)
    assert traces == 1


def test_extra_arguments_reach_the_transform() -> None:
    def scaled_by_value(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda leaf: -leaf * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled_by_value)
    params, _ = make_update(tx)(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3), value=jnp.asarray(0.25))
    np.testing.assert_array_equal(params, 0.75)


def test_a_missing_gradient_leaves_parameter_and_state() -> None:
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    tx = stable_adamw(1e-2)
    state = tx.init(params)
    updates, after = tx.update({"a": jnp.ones(3, jnp.bfloat16), "b": None}, state, params)
    assert updates["b"] is None
    for old, new in zip(
        (*state.fields.values(), state.compensation), (*after.fields.values(), after.compensation), strict=True
    ):
        assert_equal(new["b"], old["b"])
    kept, _ = make_update(tx)({"a": jnp.ones(3, jnp.bfloat16), "b": None}, state, params)
    np.testing.assert_array_equal(np.asarray(kept["b"], np.float32), 1.0)
    assert np.all(np.asarray(kept["a"], np.float32) < 1.0)


def test_weakly_typed_parameters_compile_once() -> None:
    traces = 0

    def counted(updates, state, params=None):
        nonlocal traces
        traces += 1
        return stable_adamw(1e-2).update(updates, state, params)

    tx = optax.GradientTransformation(stable_adamw(1e-2).init, counted)
    params = {"scalar": jnp.asarray(1.0), "matrix": jnp.full((2, 3), 1.0), "strong": jnp.ones(3)}
    assert params["matrix"].weak_type
    update, state = make_update(tx), tx.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda leaf: 0.5 * leaf, params)
        given = jax.tree.leaves((grads, state, params))
        params, state = update(grads, state, params)
        assert all(leaf.is_deleted() for leaf in given)
    assert traces == update.jitted._cache_size() == 1
    assert (params["matrix"].weak_type, params["strong"].weak_type) == (True, False)
