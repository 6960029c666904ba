"""States in 8 bits and stochastic bfloat16: what they decode to follows each element's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core import codings, random_bits
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.codings import eight_bit, random_fields, state_dtypes
from penstock.core.codings.eight_bit import BLOCK, is_coded, scale_shape
from penstock.core.errors import InvalidArgumentError
from penstock.core.rules import ADAMW, LION, STABLE_ADAMW
from penstock.core.rules.adam_family import AdamHyperparameters
from penstock.core.update import init_state, update

M, V = ADAMW.fields
KEY = random_bits.tensor_key(0, "w")


def words(shape: tuple[int, ...], step: int, field: int = 2) -> np.ndarray:
    place = random_bits.place(KEY, random_bits.when(step, field))
    found: np.ndarray = random_bits.bits_at(place, np.arange(np.prod(shape))).reshape(shape)
    return found


def stored(x: np.ndarray, field: Any = V, dtype: str = "8bit", step: int = 1) -> Any:
    like = codings.zeros(numpy_ops, field, x, dtype)
    return codings.store(numpy_ops, x, like, words(x.shape, step) if field.of_squares else None)


def loaded(kept: Any) -> np.ndarray:
    found: np.ndarray = codings.load(numpy_ops, kept, "float32")
    return found


def second_moment(
    gradient: Callable[[int], np.ndarray], steps: int, beta2: float, dtype: str = "8bit"
) -> tuple[np.ndarray, np.ndarray]:
    """The debiased mean of squares after these steps, and the one in float64."""
    exact = np.zeros_like(gradient(1), np.float64)
    kept = codings.zeros(numpy_ops, V, exact.astype(np.float32), dtype)
    for step in range(1, steps + 1):
        c2, g = (1 - beta2) / (1 - beta2**step), gradient(step)
        exact += c2 * (np.float64(g) ** 2 - exact)
        before = loaded(kept)
        kept = codings.store(numpy_ops, before + np.float32(c2) * (g * g - before), kept, words(g.shape, step))
    return loaded(kept).astype(np.float64), exact


def log_normal(shape: tuple[int, ...], scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.exp(scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# -- the faults that the laws must exceed ----------------------------------------------------------------------------------


def to_nearest(ops: Any, z: Any, bits: Any) -> Any:
    return np.round(np.sqrt(np.sqrt(z)))


def by_roots(ops: Any, z: Any, bits: Any) -> Any:
    """Stochastically, so that the mean of the root is right."""
    y = np.sqrt(np.sqrt(z))
    return np.floor(y) + ((bits >> 8) * 2.0**-24 < y - np.floor(y))


def to_bfloat16(ops: Any, x: Any) -> Any:
    """The block's largest value with 8 digits: it is read again in the next step, and never decays."""
    return np.max(x, axis=-1, keepdims=True).astype(numpy_dtype("bfloat16")).astype(np.float32)


# -- laws ------------------------------------------------------------------------------------------------------------------


def spiked_over_steady(steps: int, spikes: tuple[float, ...]) -> np.ndarray:
    """The mean of v over the true one, [spikes, 2]: of elements that had a spike in step 1, and of all others.

    spikes: factors of v. Up to 255^4 = 4e9 all elements of a block have a code above 1.
    """
    shape = (32 * len(spikes), BLOCK)
    generator = np.random.default_rng(3)
    spiked = generator.random(shape) < 0.05
    factor = np.where(spiked, np.repeat(np.sqrt(spikes), 32)[:, None], 1.0).astype(np.float32)

    def gradient(step: int) -> np.ndarray:
        g = np.random.default_rng(step).standard_normal(shape).astype(np.float32)
        return g * factor if step == 1 else g

    found, exact = (v.reshape(len(spikes), -1) for v in second_moment(gradient, steps, 0.999))
    where = spiked.reshape(len(spikes), -1)
    return np.array([[f[s].mean() / e[s].mean() for s in (w, ~w)] for f, e, w in zip(found, exact, where, strict=True)])


SPIKES = (1e2, 1e4, 1e6, 1e8)


@pytest.mark.parametrize("steps", [300, 1000, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_a_spike_is_forgotten_by_all_elements_of_its_block(steps: int) -> None:
    assert np.abs(spiked_over_steady(steps, SPIKES) - 1).max() <= 0.03


@pytest.mark.parametrize(("name", "fault"), [("_rounded_squares", to_nearest), ("_rounded_squares", by_roots)])
def test_other_roundings_do_not_forget_a_spike(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    monkeypatch.setattr(eight_bit, name, fault)
    assert np.abs(spiked_over_steady(300, (1e2, 1e6)) - 1).max() > 0.03


def test_a_scale_of_a_low_precision_would_not_decay_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    def ratio() -> float:
        v, exact = second_moment(lambda step: np.full((32, 128), 1.0 if step == 1 else 1e-3, np.float32), 1000, 0.9999)
        return float(v.mean() / exact.mean())

    assert abs(ratio() - 1) <= 1e-4
    monkeypatch.setattr(numpy_ops.__class__, "largest", to_bfloat16)
    assert abs(ratio() - 1) > 0.03


@pytest.mark.parametrize("beta2", [0.99, 0.999, 0.9999])
def test_constant_gradients_over_many_powers_of_ten_are_followed(beta2: float) -> None:
    """Every element is near its own square, and the mean of an octave is right: nothing follows the scale instead."""
    g = log_normal((256, 256))
    v, exact = second_moment(lambda _: g, 100, beta2)
    ratio = v / exact
    root = exact.reshape(256, 2, BLOCK)
    code = 255 * (root / root.max(-1, keepdims=True)) ** 0.25
    code, ratio = code.reshape(-1), ratio.reshape(-1)
    sure = code > 2  # a code of 1 stands for all that is less
    one_code = (((np.floor(code) + 1) / code) ** 4, (np.floor(code) / code) ** 4)
    # A step changes v by c2 of itself at most, so that it is within a code of where it was, and of the gradient's square.
    assert (ratio[sure] <= one_code[0][sure] * (1 + 4 / code[sure])).all()
    assert (ratio[sure] >= one_code[1][sure] * (1 - 4 / code[sure])).all()
    octaves = np.floor(np.log2(code[sure]))
    for octave in np.unique(octaves):
        here = octaves == octave
        if here.sum() > 1000:
            assert abs(ratio[sure][here].mean() - 1) <= 0.03


def test_gradients_of_equal_size_give_steps_of_size_one() -> None:
    signs = np.sign(np.random.default_rng(0).standard_normal((32, 160))).astype(np.float32)
    current = AdamHyperparameters(learning_rate=1.0, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8)
    parameter = np.zeros(signs.shape, np.float32)
    state = init_state(numpy_ops, ADAMW, parameter, ("8bit", "8bit"), "none")
    for step in range(1, 30):
        corrections = ADAMW.corrections(current, step, np)
        bits = {2: words(signs.shape, step)}.get
        new, state = update(numpy_ops, ADAMW, current, corrections, "none", parameter, 1e-3 * signs, state, bits=bits)
        assert np.abs(np.abs(new - parameter) - 1).max() <= 0.01
        parameter = new


def test_a_second_moment_is_zero_only_where_every_gradient_was() -> None:
    g = log_normal((32, 128), 10.0) * (np.random.default_rng(1).random((32, 128)) < 0.5)
    kept = stored((g * g).astype(np.float32))
    assert ((kept.codes == 0) == (g * g == 0)).all()
    assert (kept.codes == 1).sum() > 100  # below the smallest code


def test_the_mean_of_what_is_decoded_is_the_number() -> None:
    """Over 400 sets of random bits, within 5.5 standard errors of each element that is between two codes."""
    x = log_normal((32, 128), 4.0)
    found = np.stack([loaded(stored(x, step=step)) for step in range(400)]).astype(np.float64)
    largest = x.astype(np.float64).max(-1, keepdims=True)
    units = x / largest * 255**4
    below = np.floor(units**0.25)
    step = (below + 1) ** 4 - below**4
    chance = (units - below**4) / step
    error = np.abs(found.mean(0) - x) / (largest / 255**4 * step * np.sqrt(chance * (1 - chance)) / 20 + 1e-30)
    between = (below >= 1) & (chance > 0.05) & (chance < 0.95)
    assert between.sum() > 2000
    assert error[between].max() < 5.5


@pytest.mark.parametrize("shape", [(32, 128), (40, 200), (33, 129), (16, 4, 8, 9)])
def test_decoded_numbers_are_within_half_a_code(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    kept = stored(x, M)
    assert kept.codes.shape == shape
    assert kept.scale.shape == scale_shape(shape)
    rows, found = x.reshape(shape[0], -1), loaded(kept).reshape(shape[0], -1)
    for start in range(0, rows.shape[1], BLOCK):
        block, decoded = rows[:, start : start + BLOCK], found[:, start : start + BLOCK]
        scale = np.abs(block).max(1, keepdims=True)
        half = np.sqrt(np.abs(block) / scale) / 127 + 0.25 / 127**2  # (c + 1/2)^2 - c^2, with 127^2 for the scale
        assert (np.abs(decoded - block) <= scale * (half + 2.0**-22)).all()
        np.testing.assert_allclose(np.abs(decoded).max(1, keepdims=True), scale, rtol=2.0**-22)


def momentum_over_the_true_one(size: float) -> float:
    """The mean over elements whose gradients have `size` times the mean and the noise of those beside them."""
    draw, sizes = np.random.default_rng(0), np.where(np.arange(128) % 2, size, 1.0)
    kept, exact = stored(np.zeros((64, 128), np.float32), M), np.zeros((64, 128))
    for _ in range(100):
        gradient = (sizes * (1.0 + draw.standard_normal(exact.shape))).astype(np.float32)
        kept = codings.store(numpy_ops, np.float32(0.9) * loaded(kept) + np.float32(0.1) * gradient, kept, None)
        exact = 0.9 * exact + 0.1 * gradient
    return float(loaded(kept)[:, 1::2].mean() / exact[:, 1::2].mean())


@pytest.mark.parametrize("size", [1.0, 0.1, 1e-2, 1e-3])
def test_small_gradients_beside_large_ones_keep_their_momentum(size: float) -> None:
    """Within half a code c, ((c + 1/2)^2 - c^2)/c^2; the largest momentum of a block is at most about twice the mean."""
    code = 127 * (size / 2) ** 0.5
    assert abs(momentum_over_the_true_one(size) - 1.0) < 1 / code + 0.25 / code**2


def test_storing_a_loaded_field_keeps_its_codes() -> None:
    for field in (M, V):
        kept = stored(log_normal((40, 200)), field)
        again = codings.store(numpy_ops, loaded(kept), kept, words((40, 200), 9))
        assert (again.codes == kept.codes).all()
        np.testing.assert_allclose(again.scale, kept.scale, rtol=2.0**-22)


def test_a_quotient_above_one_does_not_wrap_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Division on a device may be off by a unit in the last place: as by a scale that is less than the largest number."""
    x = log_normal((32, 128))
    monkeypatch.setattr(numpy_ops.__class__, "largest", lambda ops, x: np.nextafter(x.max(-1, keepdims=True), np.float32(0)))
    kept = codings.store(numpy_ops, x, codings.zeros(numpy_ops, V, x, "8bit"), np.zeros(x.shape, np.int64))
    assert (kept.codes.max(-1) == 255).all()
    assert (kept.codes > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan(value: float) -> None:
    x = np.ones((32, 200), np.float32)
    x[3, 5] = value
    for field in (M, V):
        found = loaded(stored(x, field))
        assert np.isnan(found[3, :BLOCK]).all()
        assert np.isfinite(np.delete(found, 3, 0)).all()
        assert np.isfinite(found[3, BLOCK:]).all()


@pytest.mark.parametrize("beta2", [0.99, 0.999, 0.9999])
def test_a_stochastic_bfloat16_second_moment_decays_for_every_beta2(beta2: float) -> None:
    def gradient(step: int) -> np.ndarray:
        return np.full((64, 64), 1.0 if step == 1 else 1e-2, np.float32)

    v, exact = second_moment(gradient, 500, beta2, "bfloat16")
    # The mean of 4096 elements; each is rounded 500 times, by at most 2^-8 of itself.
    assert abs(v.mean() / exact.mean() - 1) <= 5 * 2.0**-8 * (500 / 4096) ** 0.5


def test_which_parameters_are_coded() -> None:
    coded = {(32, 128), (4096, 128), (64, 8, 4, 4), (1, 4096), (8, 32, 128)}
    plain = {(4096,), (64, 64), (31, 128), (), (4096, 127), (512, 3, 3)}
    assert all(map(is_coded, coded))
    assert not any(map(is_coded, plain))


def test_dtypes_that_are_asked_for() -> None:
    betas = (0.9, 0.999)
    assert state_dtypes(ADAMW.fields, "bfloat16", betas, ["8bit"] * 2) == ("8bit", "8bit")
    assert state_dtypes(ADAMW.fields, "bfloat16", betas, ["8bit"] * 2, shape=(64, 64)) == ("float32", "float32")
    assert state_dtypes(LION.fields, "float32", (None,), ["8bit"], shape=(64, 128)) == ("8bit",)
    assert state_dtypes(STABLE_ADAMW.fields, "float32", betas, ["bfloat16"] * 2) == ("bfloat16", "bfloat16")
    with pytest.raises(InvalidArgumentError, match=r"state_dtype='8bit' is not possible for a float64 parameter"):
        state_dtypes(ADAMW.fields, "float64", betas, ["8bit"] * 2)
    assert random_fields(ADAMW.fields, ("bfloat16", "bfloat16"), betas) == (2,)
    assert random_fields(ADAMW.fields, ("bfloat16", "bfloat16"), (0.9, 0.99)) == ()
    assert random_fields(ADAMW.fields, ("8bit", "8bit"), (0.9, 0.5)) == (2,)
    assert random_fields(LION.fields, ("8bit",), (None,)) == ()


def test_every_word_of_the_hash_matters() -> None:
    """Bits of another update, field, micro-batch, tensor or high index: no more in common than by chance."""
    low = np.arange(4096)

    def bits(update: int = 3, field: int = 1, microbatch: int = 0, key: int = KEY, high: int = 0) -> np.ndarray:
        place = random_bits.place(key, random_bits.when(update, field, microbatch))
        found = random_bits.bits_at(place, low, high)
        return (found >> 8) * 2.0**-24 - 0.5

    others = [bits(update=4), bits(field=2), bits(microbatch=1), bits(key=random_bits.tensor_key(0, "v")), bits(high=1)]
    others += [bits(update=1, field=3), bits(field=0, microbatch=1), np.roll(bits(), 1)]
    for other in others:
        assert abs(np.corrcoef(bits(), other)[0, 1]) < 5 / 64
