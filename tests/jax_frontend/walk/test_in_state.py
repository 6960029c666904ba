"""accumulation="state" adds every micro-batch to the moments, as the float64 reference does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, float64
from tests.support.jax_walk import LAYERS, STACK, TX, batch, parameters
from tests.support.rules import ADAM_FAMILY

from penstock.core.errors import RefusedError
from penstock.core.reference import Change, Gradient, Reference, Settings
from penstock.jax_frontend import init_train_state, make_release_step, sgd


def named(tree, i=None):
    """The arrays of the outer parameters or of one layer, by name."""
    return {f"{i}/{name}": leaf if i is None else leaf[i] for name, leaf in tree.items()}


def flat(params):
    layers = [named(params["layers"], i) for i in range(LAYERS)]
    return {name: np.asarray(leaf) for tree in (named(params["outer"]), *layers) for name, leaf in tree.items()}


@pytest.mark.parametrize(("rule", "microbatches"), [("stable_adamw", 4), ("adamw", 2), ("adam", 4)])
def test_equals_the_reference(rule, microbatches) -> None:
    with float64():
        tx, params, data = TRANSFORMS[rule](1e-2, weight_decay=0.1), parameters("float64"), batch()
        step = make_release_step(STACK, tx, microbatches=microbatches, accumulation="state")
        state, value_and_grad = init_train_state(tx, params), jax.jit(jax.value_and_grad(STACK))
        row = ADAM_FAMILY[rule]
        settings = Settings(rule, 1e-2, row.betas, row.defaults["eps"], 0.1, accumulation="state")
        reference = Reference(settings, flat(params))
        for _ in range(2):
            losses = []
            for j in range(microbatches):
                chunk = jax.tree.map(lambda leaf, j=j: leaf[j::microbatches], data)
                loss, grads = value_and_grad(params, chunk)
                losses.append(float(loss))
                for name, g in flat(grads).items():
                    reference.run(Gradient(name, g / microbatches, last=j == microbatches - 1))
            state, metrics = step(state, data)
            params = jax.tree.map(jnp.copy, state.params)
            np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-12)
            for name, value in flat(params).items():
                np.testing.assert_allclose(value, reference.tensors[name].parameter, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(state.opt_state.layers.count, np.full(LAYERS, 2))
        assert set(metrics) == {"loss", "skipped"}


def test_one_micro_batch_is_exact() -> None:
    tx, data = TX, batch()
    inside, _ = make_release_step(STACK, tx, accumulation="state")(init_train_state(tx, parameters()), data)
    exact, _ = make_release_step(STACK, tx)(init_train_state(tx, parameters()), data)
    assert_equal(inside, exact)


def test_a_momentum_gets_the_gradient_of_the_whole_batch() -> None:
    """Exactly, where the rule is linear: decay once an update, and no dampening in all of the first one."""
    with float64():
        tx, data, runs = sgd(1e-2, 0.9, 0.3, weight_decay=0.1), batch(), []
        for options in ({"microbatches": 4, "accumulation": "state"}, {}):
            step, state = make_release_step(STACK, tx, **options), init_train_state(tx, parameters("float64"))
            for _ in range(3):
                state, _ = step(state, data)
            runs.append(state)
        assert_close(*runs, rtol=1e-12, atol=1e-13)


def test_low_precision_states_keep_dtypes_and_are_donated() -> None:
    tx, data, params = TX, batch(), parameters("bfloat16")
    step, state = make_release_step(STACK, tx, microbatches=4, accumulation="state"), init_train_state(tx, params)
    dtypes = jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), state)
    for _ in range(2):
        given = jax.tree.leaves(state)
        state, _ = step(state, data)
        assert all(leaf.is_deleted() for leaf in given)
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), state) == dtypes
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state.layers.compensation))


def test_betas_given_as_arrays_change_between_two_steps_only() -> None:
    """Two transforms over one state: the second has other betas. The float64 reference has raw moments."""
    with float64():
        params, data = parameters("float64"), batch()
        betas = [(0.9, 0.99), (0.5, 0.95)]
        reference = Reference(Settings("adamw", 1e-2, betas[0], 1e-8, 0.1, accumulation="state"), flat(params))
        value_and_grad = jax.jit(jax.value_and_grad(STACK))
        state = None
        for b1, b2 in betas:
            reference.run(Change({"betas": (b1, b2)}))
            tx = TRANSFORMS["adamw"](1e-2, b1=jnp.asarray(b1), b2=jnp.asarray(b2), weight_decay=0.1)
            state = init_train_state(tx, params) if state is None else state
            for j in range(2):
                _, grads = value_and_grad(params, jax.tree.map(lambda leaf, j=j: leaf[j::2], data))
                for name, g in flat(grads).items():
                    reference.run(Gradient(name, g / 2, last=j == 1))
            state, _ = make_release_step(STACK, tx, microbatches=2, accumulation="state")(state, data)
            params = jax.tree.map(jnp.copy, state.params)
        for name, value in flat(params).items():
            np.testing.assert_allclose(value, reference.tensors[name].parameter, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(state.opt_state.layers.betas["beta1"], np.full(LAYERS, 0.5))


def test_it_is_refused_for_a_rule_whose_step_needs_the_gradient() -> None:
    with pytest.raises(RefusedError, match=r"'state' is not possible for lion, .*; leave accumulation out"):
        make_release_step(STACK, TRANSFORMS["lion"](1e-3), accumulation="state")
