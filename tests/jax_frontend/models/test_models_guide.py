"""Models of every library train through the walk as with the plain gradient and update; the guide's examples run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.guide_support import examples, run
from tests.jax_support import assert_close, float64
from tests.walk_support import reference

from penstock.jax_frontend import init_train_state, make_release_step, stable_adamw

MODELS = examples("jax_models.md")


def test_there_is_an_example_for_every_kind_of_model() -> None:
    assert set(MODELS) == {"Plain pytrees", "flax.linen", "flax.nnx", "equinox"}


@pytest.mark.parametrize("heading", MODELS)
def test_a_model_of_the_guide_trains_as_with_the_plain_gradient(heading: str) -> None:
    names = run(heading, MODELS[heading])
    stack, batch, tx = names["stack"], names["batch"], stable_adamw(1e-2, weight_decay=0.1)
    with float64():
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), names["params"])
        step, plain = make_release_step(stack, tx), reference(stack, tx)
        state, expected = init_train_state(tx, params), init_train_state(tx, params)
        for _ in range(2):
            state, metrics = step(state, batch)
            expected, loss, _ = plain(expected, batch)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        assert_close(state, expected, rtol=1e-12, atol=1e-12)
