"""Portable state of sharded parameters: the file is that of whole ones, and an import restores the shardings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_sharding import LAYOUTS, ROWS, WIDTH, programs, rows, spread
from tests.support.jax_training import float64
from tests.support.jax_walk import STACK, TX, batch, parameters

from penstock.jax_frontend import export_state, import_state, init_train_state, make_release_step


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_state_writes_the_same_bytes_and_comes_back_sharded(tmp_path: Path, layout: str) -> None:
    params, data = parameters("bfloat16", width=WIDTH), rows(batch(ROWS))
    step, state = make_release_step(STACK, TX), init_train_state(TX, spread(params, layout))
    state, _ = step(state, data)
    files = [tmp_path / name for name in ("sharded", "whole")]
    export_state(files[0], TX, state, parameters=True)
    whole = import_state(files[0], TX, init_train_state(TX, params), parameters=True)
    export_state(files[1], TX, whole, parameters=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    fresh = init_train_state(TX, spread(jax.tree.map(jnp.ones_like, params), layout))
    found = import_state(files[1], TX, fresh, parameters=True)
    for a, b, place in zip(jax.tree.leaves(found), jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert a.sharding == place.sharding
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    goes_on, compiled = step(state, data)[0], programs()
    assert_equal(step(found, data)[0], goes_on)
    assert programs() == compiled


def assert_equal(one: object, other: object) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
