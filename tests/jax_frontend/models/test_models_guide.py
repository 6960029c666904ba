"""The guide's examples for every library train in the walk as with the plain gradient and update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.support.examples import examples, run
from tests.support.jax_training import assert_close, float64
from tests.support.jax_walk import reference

import penstock.jax_frontend as frontend

MODELS = examples("jax_models.md")


def test_there_is_an_example_for_every_kind_of_model() -> None:
    kinds = {"Plain pytrees", "flax.linen", "flax.nnx", "equinox", "MaxText: a scanned decoder", "Several stacks"}
    assert set(MODELS) == kinds


@pytest.mark.parametrize("heading", MODELS)
def test_an_example_trains_as_with_the_plain_gradient(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run in float64, and what it gives its step is given to the plain one, too."""
    initial, batches, walk, init = [], [], frontend.make_release_step, frontend.init_train_state

    def init_in_float64(tx: Any, params: Any, **given: Any) -> Any:
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        initial.append(init(tx, wide, **given))
        return init(tx, wide, **given)

    def recorded(stack: Any, tx: Any) -> Any:
        step = walk(stack, tx)

        def run(state: Any, batch: Any) -> Any:
            batches.append(batch)
            return step(state, batch)

        return run

    monkeypatch.setattr(frontend, "init_train_state", init_in_float64)
    monkeypatch.setattr(frontend, "make_release_step", recorded)
    with float64():
        names = run(heading, MODELS[heading])
        (expected,), plain = initial, reference(names["stack"], names["tx"])
        for batch in batches:
            expected, loss, _ = plain(expected, batch)
        assert len(batches) == 3
        assert_close(names["state"], expected, rtol=1e-12, atol=1e-12)
        assert abs(float(names["metrics"]["loss"]) - float(loss)) < 1e-12
        if "Decoder" in names:  # a model that runs by itself, too
            logits = names["Decoder"]().apply({"params": names["trained"]}, batch["tokens"])
            own = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
            assert abs(float(own) - float(names["stack"](names["state"].params, batch))) < 1e-12
