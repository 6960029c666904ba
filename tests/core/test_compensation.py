"""What (p, k) stands for survives being stored, for every number there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import compensation as compensations
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.errors import InvalidArgumentError

PAIRS = [("bfloat16", "kahan"), ("bfloat16", "split"), ("float16", "kahan")]


def there_and_back(x: np.ndarray, compensation: str, dtype: str) -> tuple[np.ndarray, compensations.Stored]:
    stored = compensations.store(numpy_ops, compensation, x, dtype)
    return compensations.load(numpy_ops, compensation, stored), stored


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@settings(deadline=None, derandomize=True)
def test_split_keeps_every_bit(bits: list[int]) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    back, stored = there_and_back(x, "split", "bfloat16")
    number, shown = ~np.isnan(x), stored.parameter.astype(np.float32)
    expected = np.where((shown == 0) | np.isinf(shown), shown, x)  # what rounds to zero or infinity is that
    assert np.array_equal(back.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.all(np.isnan(back[~number]))
    assert np.all(np.isnan(stored.parameter[~number].astype(np.float32)))
    assert stored.compensation.dtype == np.int16


def test_split_keeps_ties_and_the_ends_of_the_range() -> None:
    bits = [0x3F808000, 0x3F818000, 0xBF808000, 0x7F7F7FFF, 0xFF7F7FFF, 0x7F800000, 0xFF800000, 0x00008000, 0x80000000]
    x = np.array(bits, np.uint32).view(np.float32)
    assert np.array_equal(there_and_back(x, "split", "bfloat16")[0].view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize(("dtype", "compensation"), PAIRS)
def test_a_written_parameter_is_read_within_half_a_spacing(dtype: str, compensation: str) -> None:
    """A remainder from before the user wrote p changes it by half a spacing at most, and zeros and infinities not at all."""
    rng, size = np.random.default_rng(0), 100_000

    def numbers(low: int) -> np.ndarray:
        return (rng.normal(size=size) * 2.0 ** rng.integers(low, 12, size)).astype(np.float32)

    stale = compensations.store(numpy_ops, compensation, numbers(-12), dtype)
    written = numbers(-24).astype(numpy_dtype(dtype))
    written[: size // 2] = np.resize([0.0, -0.0, np.inf, -np.inf, 1.0], size // 2)
    read = compensations.load(numpy_ops, compensation, compensations.Stored(written, stale.compensation))
    shown = written.astype(np.float32)
    exact = (shown == 0) | np.isinf(shown)
    assert np.array_equal(read[exact], shown[exact])
    digits, smallest = {"bfloat16": (8, -133), "float16": (11, -24)}[dtype]
    exponent = np.floor(np.log2(np.abs(shown[~exact]).astype(np.float64)))
    half_spacing = 2.0 ** np.maximum(exponent - digits, smallest - 1)
    assert np.all(np.abs(read[~exact].astype(np.float64) - shown[~exact]) <= half_spacing)


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 8), ("float16", 11)])
def test_kahan_uses_every_remainder_of_its_own(dtype: str, digits: int) -> None:
    """Remainders that round to half a spacing, and those next to powers of two, are used like all others."""
    rng = np.random.default_rng(0)
    neighbours = 1.0 + 2.0 ** (1 - digits) * np.arange(8)
    near_ties = (neighbours[:, None] + 2.0**-digits * (1 + np.array([-1.0, 1.0]) * 2.0**-13)).ravel()
    below_one = 1.0 - 2.0 ** -(digits + 1) * rng.random(1000)
    x = np.concatenate([near_ties, neighbours, below_one, rng.normal(size=10_000)]).astype(np.float32)
    back, stored = there_and_back(x, "kahan", dtype)
    assert stored.compensation is not None
    assert np.array_equal(back, stored.parameter.astype(np.float32) + stored.compensation.astype(np.float32))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
@settings(deadline=None, derandomize=True)
def test_the_parameter_itself_is_the_nearest_one(values: list[float]) -> None:
    x = np.array(values, np.float32)
    for dtype, compensation in PAIRS:
        parameter = compensations.store(numpy_ops, compensation, x, dtype).parameter.astype(np.float64)
        nearest = x.astype(numpy_dtype(dtype)).astype(np.float64)
        assert np.all(np.abs(parameter - x) == np.abs(nearest - x))  # ties may go either way


@given(st.lists(st.floats(2.0**-6, 1e4, width=32), min_size=1, max_size=50))
@settings(deadline=None, derandomize=True)
def test_kahan_keeps_twice_the_digits(values: list[float]) -> None:
    x = np.array(values, np.float32)
    for dtype, digits in (("bfloat16", 8), ("float16", 11)):
        back, _ = there_and_back(x, "kahan", dtype)
        # p is off by at most 2^-digits |x|, and k, which holds that, by at most 2^-digits of it, or half the smallest number.
        bound = np.abs(x) * 2.0 ** (-2 * digits) + 2.0**-25 + np.abs(x) * 2.0**-24
        assert np.all(np.abs(back - x) <= bound)


@pytest.mark.parametrize(("dtype", "compensation"), PAIRS)
def test_nonfinite_numbers_stay_nonfinite(dtype: str, compensation: str) -> None:
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    back, _ = there_and_back(x, compensation, dtype)
    assert np.array_equal(back, x, equal_nan=True)
    if dtype == "float16":  # 70000 is beyond its range
        assert np.isinf(there_and_back(np.array([7e4], np.float32), compensation, dtype)[0]).all()


def test_which_compensation_a_parameter_gets() -> None:
    resolve = compensations.resolve
    assert [resolve("auto", dtype) for dtype in ("float64", "float32", "bfloat16", "float16")] == [
        "none",
        "none",
        "split",
        "kahan",
    ]
    assert resolve("kahan", "float32") == "none"  # nothing to keep
    with pytest.raises(InvalidArgumentError, match=r"compensation='split'.*kahan"):
        resolve("split", "float16")
    with pytest.raises(InvalidArgumentError, match=r"compensation='half'.*auto, auto8, none, kahan, split"):
        resolve("half", "float32")


def test_a_kahan_number_that_overflows_or_is_none_keeps_nothing() -> None:
    x = np.array([7e4, -np.inf, np.nan], np.float32)
    stored = compensations.store(numpy_ops, "kahan", x, "float16")
    assert stored.compensation is not None
    assert np.array_equal(stored.compensation, np.zeros(3, np.float16))
