"""The transforms under JAX's own transformations: vmap and scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, scanned_over, train

CASES = pytest.mark.parametrize(("rule", "dtype"), [("stable_adamw", "bfloat16"), *[(rule, "float32") for rule in TRANSFORMS]])


def layers(seed: int, dtype: str, count: int = 4) -> jax.Array:
    """Stacked matrices, each ten times as large as the one before."""
    scale = 10.0 ** np.arange(count)[:, None, None]
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 3, 2)) * scale, dtype)


@CASES
def test_vmap_equals_each_layer_by_itself(rule, dtype) -> None:
    tx = TRANSFORMS[rule](1e-2)
    per_layer = optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
    params, grads = layers(0, dtype), [layers(seed, dtype).at[1].mul(30.0) for seed in (1, 2, 3)]
    stacked, _ = train(per_layer, params, grads)
    for index in range(len(params)):
        alone, _ = train(tx, params[index], [gradient[index] for gradient in grads])
        assert_close(stacked[index], alone, rtol=1e-6 if dtype == "float32" else 2**-7)


@CASES
def test_scan_equals_the_loop(rule, dtype) -> None:
    tx = TRANSFORMS[rule](optax.linear_schedule(1e-2, 0.0, 10))
    params, grads = layers(0, dtype), [layers(seed, dtype) for seed in range(1, 6)]
    looped, looped_state = train(tx, params, grads)
    scanned, scanned_state = scanned_over(tx, params, jnp.stack(grads), False)
    assert_close(scanned, looped, rtol=1e-6 if dtype == "float32" else 2**-7)
    assert scanned_state.count == looped_state.count == 5


def test_the_count_saturates() -> None:
    tx = TRANSFORMS["adamw"](1e-2)
    state = tx.init(jnp.ones(2))._replace(count=jnp.asarray(2**31 - 1, jnp.int32))
    _, state = tx.update(jnp.ones(2), state, jnp.ones(2))
    assert state.count == 2**31 - 1
