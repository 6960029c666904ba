"""Random bits are the same in every framework, uniform, and independent of those of any other place and time."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from penstock.core import random_bits
from penstock.core.errors import InvalidArgumentError

N = 2**16
SIGMAS = 5.0  # of the thousands of numbers below none lies further out, except by chance for one key in a hundred
BASE = {"key": random_bits.tensor_key(0, "w"), "update": 1, "field": 0, "microbatch": 0, "high": 0}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "the next update": {"update": 2},
    "an update much later": {"update": 1 + 2**20},
    "another field": {"field": 1},
    "the next micro-batch": {"microbatch": 1},
    "2^32 elements on": {"high": 1},
    "another tensor": {"key": random_bits.tensor_key(0, "v")},
    "another seed": {"key": random_bits.tensor_key(1, "w")},
    "the first layer": {"key": random_bits.layer_key(BASE["key"], 0)},
    "field and micro-batch exchanged": {"field": 1, "microbatch": 2},
}


def words(index: Any, *, key: Any, update: Any, field: int, microbatch: int, high: int) -> Any:
    place = random_bits.place(key, random_bits.when(update, field, microbatch))
    return random_bits.bits_at(place, index, high)


def lanes(found: np.ndarray, count: int = 32) -> np.ndarray:
    """The highest bits of words as +-1, [count, n]."""
    return 1.0 - 2.0 * ((found[None] >> np.arange(32 - count, 32)[:, None]) & 1)


def test_known_answers() -> None:
    assert random_bits.mix(0) == 0
    assert [random_bits.mix(1), random_bits.mix(2**32 - 1)] == [2261973619, 2578835075]
    keys = [BASE["key"], ELSEWHERE["another seed"]["key"], ELSEWHERE["the first layer"]["key"]]
    assert keys == [375219467, 3006640646, 1428434531]
    assert words(np.array([0, 1, 2**16, 2**32 - 1]), **BASE).tolist() == [3373590019, 264517632, 363456223, 1705111562]


@pytest.mark.parametrize("where", [{}, *ELSEWHERE.values()], ids=["here", *ELSEWHERE])
def test_every_framework_has_the_same_bits(where: dict[str, Any]) -> None:
    at, index = {**BASE, **where}, np.array([*range(1000), 2**16 - 1, 2**16, 2**31 - 1])
    expected = words(index, **at)
    assert [words(int(one), **at) for one in index] == expected.tolist()
    on_device = {name: torch.tensor(at[name]) for name in ("key", "update")}
    assert words(torch.from_numpy(index), **at).tolist() == expected.tolist()
    assert words(torch.from_numpy(index), **{**at, **on_device}).tolist() == expected.tolist()
    in_32_bits = {name: torch.tensor(number, dtype=torch.int64).to(torch.int32) for name, number in at.items()}
    found = words(torch.from_numpy(index).to(torch.int32), **in_32_bits)
    assert found.dtype == torch.int32
    assert (found.long() & random_bits.WORD).tolist() == expected.tolist()

    def traced(index: jax.Array, key: jax.Array, update: jax.Array) -> jax.Array:
        return words(index, **{**at, "key": key, "update": update})

    assert not jax.config.jax_enable_x64
    found = jax.jit(traced)(*(jnp.asarray(x, jnp.uint32) for x in (index, at["key"], at["update"])))
    assert found.dtype == jnp.uint32
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("where", [{}, *ELSEWHERE.values()], ids=["here", *ELSEWHERE])
def test_bits_are_uniform(where: dict[str, Any]) -> None:
    """Chi-square of each byte over its 256 values, which has mean 255 and variance 510; each bit is 0 as often as 1."""
    found = words(np.arange(N), **{**BASE, **where})
    assert len(np.unique(found)) == N  # one to one
    for shift in range(0, 32, 8):
        counts = np.bincount((found >> shift) & 0xFF, minlength=256)
        chi_square = np.sum((counts - N / 256) ** 2) / (N / 256)
        assert abs(chi_square - 255) < SIGMAS * 510**0.5
    assert np.abs(lanes(found).mean(axis=1)).max() < SIGMAS * N**-0.5


def fractions(found: np.ndarray) -> np.ndarray:
    """Words as numbers of mean 0 and variance 1."""
    return (found * 2.0**-32 - 0.5) * 12**0.5


@pytest.mark.parametrize("where", ELSEWHERE.values(), ids=ELSEWHERE)
def test_bits_elsewhere_are_independent(where: dict[str, Any]) -> None:
    """The correlations of the words, and of any two of their 8 highest bits, means over N elements, are within 5/sqrt(N)."""
    here, there = words(np.arange(N), **BASE), words(np.arange(N), **{**BASE, **where})
    assert np.abs(lanes(here, 8) @ lanes(there, 8).T / N).max() < SIGMAS * N**-0.5
    assert abs(np.mean(fractions(here) * fractions(there))) < SIGMAS * N**-0.5
    assert len(np.intersect1d(here, there)) < N * N / 2**32 + SIGMAS * (N * N / 2**32) ** 0.5


def test_any_two_of_many_places_are_independent() -> None:
    """Updates, fields, tensors and parts of 2^16 elements, all with all: none of their 20,000 correlations is beyond it."""
    others = [{"update": n} for n in range(2, 80)] + [{"high": n} for n in range(1, 60)] + [{"field": n} for n in (1, 2, 3)]
    others += [{"microbatch": n} for n in range(1, 20)] + [{"key": random_bits.tensor_key(0, str(n))} for n in range(40)]
    found = np.stack([fractions(words(np.arange(N), **{**BASE, **where})) for where in others])
    together = found @ found.T / N
    assert np.abs(together - np.diag(np.diag(together))).max() < SIGMAS * N**-0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 128, 4096, 50_257, 2**16, 2**20, 2**31])
def test_bits_of_other_elements_are_independent(lag: int) -> None:
    index = np.arange(N)
    here, there = words(index, **BASE), words(index + lag, **BASE)
    assert np.abs(lanes(here, 8) @ lanes(there, 8).T / N).max() < SIGMAS * N**-0.5


@pytest.mark.parametrize("index", [0, 7, 2**16])
def test_bits_of_one_element_are_independent_over_time(index: int) -> None:
    series = np.array([words(index, **{**BASE, "update": update}) for update in range(1, 4097)])
    for lag in (1, 2, 10):
        together = lanes(series[lag:]) @ lanes(series[:-lag]).T / (len(series) - lag)
        assert np.abs(together).max() < SIGMAS * (len(series) - lag) ** -0.5


@pytest.mark.parametrize("lag", [1, 2, 128, 640])
def test_neighbours_have_nothing_in_common_over_time(lag: int) -> None:
    """All elements of a tensor share the product of an update: the mean over updates is right for every pair of them."""
    updates = 400
    found = np.stack([fractions(words(np.arange(2**13), **{**BASE, "update": update})) for update in range(updates)])
    together = (found[:, lag:] * found[:, :-lag]).mean(axis=0) * updates**0.5
    assert abs(together.std() - 1) < 0.05
    assert np.abs(together).max() < 6


def test_keys_differ_by_tensor_seed_and_layer() -> None:
    keys = {random_bits.tensor_key(seed, str(name)) for seed, name in itertools.product(range(30), range(30))}
    assert len(keys) == 900
    layers = {random_bits.layer_key(BASE["key"], layer) for layer in range(1000)}
    assert len(layers | {BASE["key"]}) == 1001


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None, "0"])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"seed=.* must be an int in \[0, 2\*\*32\)"):
        random_bits.check_seed(seed)
