"""A stochastically rounded number is right in the mean, and a number that needs no rounding stays what it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.stochastic_rounding import DROPPED_BITS, LARGEST, stochastically_rounded
from penstock.jax_frontend.array_ops import jax_ops
from penstock.torch_frontend.array_ops import torch_ops

DTYPES = list(DROPPED_BITS)


def rounded(x: np.ndarray, dtype: str, bits: np.ndarray) -> np.ndarray:
    return np.asarray(stochastically_rounded(numpy_ops, np.asarray(x, np.float32), dtype, bits))


def every_number(dtype: str) -> np.ndarray:
    """Every number of the dtype, and its infinities."""
    bits = np.arange(2**16, dtype=np.uint16)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    return bits[(bits & 0x7FFF) <= infinity].view(numpy_dtype(dtype))


def finite_numbers(dtype: str) -> np.ndarray:
    """The finite numbers of the dtype in increasing order, as float32."""
    numbers = np.unique(every_number(dtype).astype(np.float32))
    return numbers[np.isfinite(numbers)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_of_the_dtype_never_moves(dtype: str) -> None:
    there = every_number(dtype)
    for word in (0, 1 << 16, 0x55555555, 2**20 - 1, 2**32 - 1):
        back = rounded(there.astype(np.float32), dtype, np.full(there.shape, word)).astype(there.dtype)
        assert np.array_equal(back.view(np.uint16), there.view(np.uint16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_over_all_random_bits_is_the_number(dtype: str) -> None:
    """Exactly for normal numbers; below 2^-14, float16's within 2^-20 of a spacing. The highest bits of a word are random."""
    rng, dropped = np.random.default_rng(0), DROPPED_BITS[dtype]
    smallest = {"bfloat16": -126, "float16": -14}[dtype]
    x = (rng.uniform(1, 2, 40) * 2.0 ** rng.integers(smallest, 15, 40) * rng.choice([-1, 1], 40)).astype(np.float32)
    found = rounded(x[:, None], dtype, np.arange(2**dropped)[None] << (32 - dropped)).astype(np.float64)
    assert np.array_equal(found.mean(axis=1), x.astype(np.float64))
    low = (rng.uniform(0, 1, 10) * 2.0**smallest).astype(np.float32)  # bfloat16 has the exponents of float32
    count = 16 if dtype == "bfloat16" else 20
    found = rounded(low[:, None], dtype, np.arange(2**count)[None] << (32 - count)).astype(np.float64)
    assert np.abs(found.mean(axis=1) - low).max() <= (0.0 if dtype == "bfloat16" else 2.0**-44)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_one_of_the_two_neighbours(dtype: str) -> None:
    numbers = finite_numbers(dtype)
    low, high = numbers[:-1], numbers[1:]
    # The smallest float32 above and below the neighbours: they have them, too.
    for x in (low + (high - low) * np.float32(0.3), np.nextafter(low, high), np.nextafter(high, low)):
        for word in (0, 12345 << 16, 2**32 - 1):
            found = rounded(x, dtype, np.full(x.shape, word))
            assert np.all((found == low) | (found == high))


@pytest.mark.parametrize("dtype", DTYPES)
def test_above_the_largest_number_it_is_rounded_to_nearest(dtype: str) -> None:
    largest = LARGEST[dtype]
    assert largest == finite_numbers(dtype)[-1]
    half_way = np.float32(largest + {"bfloat16": 2.0**119, "float16": 16.0}[dtype])
    x = np.array([largest, np.nextafter(half_way, np.float32(0)), half_way, np.inf, np.nan], np.float32)
    for word in (0, 2**32 - 1):
        found = rounded(np.concatenate([x, -x]), dtype, np.full(10, word))
        stored = numpy_ops.cast(found, dtype).astype(np.float32)
        expected = np.array([largest, largest, np.inf, np.inf, np.nan], np.float32)
        assert np.array_equal(stored, np.concatenate([expected, -expected]), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_framework_rounds_alike(dtype: str) -> None:
    """Numbers of all sizes but those that XLA flushes to zero on a CPU."""
    rng, size = np.random.default_rng(0), 4096
    x = (rng.normal(size=size) * 2.0 ** rng.integers(-120, 125, size)).astype(np.float32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-14]
    bits = rng.integers(0, 2**32, size)
    expected = numpy_ops.cast(rounded(x, dtype, bits), dtype).view(np.uint16)
    there = stochastically_rounded(torch_ops, torch.from_numpy(x), dtype, torch.from_numpy(bits))
    in_jax = jax.jit(lambda x, bits: jax_ops.cast(stochastically_rounded(jax_ops, x, dtype, bits), dtype))
    found = np.asarray(in_jax(jnp.asarray(x), jnp.asarray(bits, jnp.uint32))).view(np.uint16)
    number = ~np.isnan(x)
    assert np.array_equal(torch_ops.cast(there, dtype).view(torch.uint16).numpy()[number], expected[number])
    assert np.array_equal(found[number], expected[number])
