"""Large parameters in low precision are updated without a float32 copy of them, and to the same numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_training import assert_close, assert_equal

from penstock.core.compensation import Stored, load, resolve
from penstock.jax_frontend import adam, adamw, make_update, one_by_one, stable_adamw
from penstock.jax_frontend.array_ops import jax_ops
from penstock.jax_frontend.dependencies import flow
from penstock.jax_frontend.direct import apply_directly

SHAPE, PIECE = (16, 61, 8), 512  # 16 pieces of 3 or 4 rows along the second axis
ROWS = {
    "adamw, split": (adamw(1e-2), "bfloat16", 1),
    "adamw, kahan": (adamw(1e-2, compensation="kahan"), "float16", 1),
    "adamw, none": (adamw(1e-2, compensation="none"), "bfloat16", 0),
    "adam, split": (adam(1e-2), "bfloat16", 1),
    "stable_adamw, split": (stable_adamw(1e-2), "bfloat16", 1),
    "stable_adamw, none": (stable_adamw(1e-2, compensation="none"), "bfloat16", 0),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of SHAPE are large, and there is one device, as users have it on a CPU."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(one_by_one, "LARGE", 1000)
    monkeypatch.setattr(one_by_one, "PIECE", PIECE)


def tree(seed: int, dtype: str) -> dict[str, jax.Array]:
    generator = np.random.default_rng(seed)
    return {name: jnp.asarray(generator.normal(size=SHAPE) * (1 + 30 * (seed == 2)), dtype) for name in "abc"}


@pytest.mark.parametrize("row", ROWS)
def test_temporaries_are_one_parameter_in_its_dtype(row: str, large: None) -> None:
    """One parameter's compensation waits for the new parameter; without compensation nothing waits. Pieces are summed in
    float32, with two scalars as arrays of a piece."""
    tx, dtype, waiting = ROWS[row]
    params = tree(0, dtype)
    analysis = make_update(tx).lower(tree(1, dtype), tx.init(params), params).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= waiting * params["a"].nbytes + 4 * PIECE * 4 + 2048  # 2048: numbers


@pytest.mark.parametrize("row", ROWS)
def test_one_by_one_equals_at_once(row: str, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments on every bit. The numbers p + k within one rounding an update, as products and sums may be contracted otherwise
    to fused multiply-adds: 2^-22 of a number (kahan's digits), 2^-24 where float16 is subnormal; and within 2^-20 of a step,
    since StableAdamW's mean square is summed in another order."""
    tx, dtype, _ = ROWS[row]

    def trained() -> tuple[Any, Any]:
        params = tree(0, dtype)
        update, state = make_update(tx), tx.init(params)
        for seed in (1, 2, 3):
            params, state = update(tree(seed, dtype), state, params)
        compensation = resolve(tx.arguments.compensation, dtype)
        kept = [state.compensation[name] for name in params]
        numbers = [load(jax_ops, compensation, Stored(params[name], k)) for name, k in zip(params, kept, strict=True)]
        return state.fields, numbers

    one_after_the_other = trained()
    monkeypatch.setattr(one_by_one, "LARGE", 2**20)
    at_once = trained()
    assert_equal(one_after_the_other[0], at_once[0])
    assert_close(one_after_the_other[1], at_once[1], rtol=3 * 2.0**-22, atol=3 * (2.0**-24 + 1e-2 * 2.0**-20))


def test_updates_may_wait_for_each_other_only_if_all_gradients_exist(large: None) -> None:
    """In a training step the gradient of the first layer is the last: an update that waited for it would keep all others."""
    tx, params = adamw(1e-2), tree(0, "bfloat16")
    state, names = tx.init(params), list(params)

    def gradients_read(in_turn: bool) -> list[int]:
        update = functools.partial(apply_directly, tx, in_turn=in_turn)
        traced = jax.make_jaxpr(lambda grads: update(grads, state, params)[0])(params)
        return flow(traced.jaxpr, [1 << i for i in range(len(names))])

    assert gradients_read(False) == [0b001, 0b010, 0b100]
    assert gradients_read(True) == [0b001, 0b011, 0b111]
