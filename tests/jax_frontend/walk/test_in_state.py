"""accumulation="state" adds every micro-batch to the moments, as the float64 reference does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, assert_equal, float64
from tests.support.jax_walk import LAYERS, STACK, TX, batch, parameters
from tests.support.rows import rows
from tests.support.rules import ADAM_FAMILY

from penstock.core.errors import RefusedError
from penstock.core.reference import Change, Gradient, Reference, Settings
from penstock.jax_frontend import adamw, init_train_state, make_release_step, muon, sgd


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


def rules(first: Any, **settings: Any) -> Any:
    """One transform of two rules, by the names of the leaves; a third has none."""
    given = {"first": first, "second": adamw(1e-2, **settings), "nobody": adamw(1e-2)}
    return optax.partition(given, lambda tree: {name: "first" if name in ("up", "embedding") else "second" for name in tree})


@pytest.mark.parametrize("settings", rows([{}, {"mu_dtype": "bfloat16", "compensation": "stochastic"}], bool))
def test_each_rule_of_a_partition_accumulates_as_it_does_alone(settings: dict[str, Any]) -> None:
    """In every bit, for one step, whose gradients are the same; each counts it, also the one that has no leaf."""
    dtype, momentum = "bfloat16" if settings else "float32", sgd(1e-2, 0.9)
    start, data = parameters(dtype), batch()
    found = {}
    for name, tx in {"both": rules(momentum, **settings), "first": momentum, "second": adamw(1e-2, **settings)}.items():
        step = make_release_step(STACK, tx, microbatches=4, accumulation="state")
        found[name] = step(init_train_state(tx, start), data)[0]
    for part, name in (("outer", "embedding"), ("outer", "scale"), ("layers", "up"), ("layers", "down"), ("layers", "bias")):
        alone = found["first" if name in ("up", "embedding") else "second"]
        assert_equal(found["both"].params[part][name], alone.params[part][name])
    assert jax.tree.structure(found["both"]) == jax.tree.structure(init_train_state(rules(momentum, **settings), start))
    counts = {label: inner.inner_state.count for label, inner in found["both"].opt_state.layers.inner_states.items()}
    assert {label: count.tolist() for label, count in counts.items()} == dict.fromkeys(counts, [1] * LAYERS)


def test_muon_without_nesterov_is_exact_beside_adamw() -> None:
    def label(tree: Any) -> Any:
        return {name: "muon" if name in ("up", "down") else "adamw" for name in tree}

    with float64():
        start, data, found = parameters("float64"), batch(), []
        for options in ({}, {"accumulation": "state"}):
            given = {"muon": muon(1e-2, nesterov=False, ns_dtype="float32"), "adamw": adamw(1e-2)}
            tx = optax.partition(given, label)
            step: Any = make_release_step(STACK, tx, microbatches=4, **options)  # type: ignore[arg-type]
            state = init_train_state(tx, start)
            found.append(step(state, data)[0].params)
        exact, inside = found
        for name in ("up", "down"):
            assert_close(inside["layers"][name], exact["layers"][name], rtol=1e-9, atol=1e-12)
        assert not np.allclose(inside["layers"]["bias"], exact["layers"]["bias"], rtol=1e-9, atol=1e-12)


OTHERS = {
    "chained": optax.chain(optax.clip(1.0), rules(sgd(1e-2, 0.9))),
    "another library's": rules(optax.sgd(1e-2)),
    "frozen": rules(optax.set_to_zero()),
    "masked": optax.masked(adamw(1e-2), lambda tree: {name: name == "up" for name in tree}),
    "injected": optax.inject_hyperparams(adamw)(1e-2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_transforms_in_or_around_a_partition_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=r"own transforms, and optax\.partition of them.*microbatches alone"):
        make_release_step(STACK, OTHERS[name], microbatches=4, accumulation="state")(
            init_train_state(OTHERS[name], parameters()), batch()
        )


def test_a_rule_of_a_partition_that_needs_the_gradient_is_refused_by_name() -> None:
    tx = rules(sgd(1e-2, 0.9, nesterov=True))
    state = init_train_state(tx, parameters())
    with pytest.raises(RefusedError, match="not possible for sgd_nesterov, whose step needs the whole gradient"):
        make_release_step(STACK, tx, microbatches=4, accumulation="state")(state, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
