"""The training loops of flax.nnx and equinox in docs/jax_libraries.md train as the plain gradient and update do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.support.examples import examples, run
from tests.support.jax_training import assert_close, float64

from penstock.jax_frontend import stable_adamw

LOOPS = examples("jax_libraries.md")


def test_there_is_an_example_for_each_library() -> None:
    assert set(LOOPS) == {"flax.nnx.Optimizer", "equinox"}


def plain(loss: Any, params: Any, batch: Any) -> Any:
    """The parameters after three steps that donate nothing."""
    tx = stable_adamw(1e-2)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    return params


def test_nnx_optimizer_trains_as_the_plain_update() -> None:
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "List"):
        pytest.skip("nnx.List is of flax 0.12")
    with float64():
        text = LOOPS["flax.nnx.Optimizer"].replace("rngs=rngs)", "rngs=rngs, param_dtype=float)")
        names = run("flax.nnx.Optimizer", text)
        graph, params = nnx.split(names["Model"](nnx.Rngs(0)))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        expected = plain(lambda params, batch: names["loss"](nnx.merge(graph, params), batch), params, names["batch"])
        assert_close(nnx.state(names["model"], nnx.Param), expected, rtol=1e-12, atol=1e-12)
        assert names["losses"][2] < names["losses"][0]


def test_an_equinox_model_trains_as_the_plain_update() -> None:
    eqx = pytest.importorskip("equinox")
    with float64():
        names = run("equinox", LOOPS["equinox"])
        params, static = eqx.partition(names["Model"](jax.random.key(0)), eqx.is_inexact_array)
        expected = plain(lambda params, batch: names["loss"](eqx.combine(params, static), batch), params, names["batch"])
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        assert_close(names["state"].params, expected, rtol=1e-12, atol=1e-12)
        assert names["metrics"]["loss"] < names["loss"](eqx.combine(params, static), names["batch"])
