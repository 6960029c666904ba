r"""The codings in float64, written a second time: what stored numbers stand for, and what a number is stored as.

All of them are monotone for given random bits. So a number that is known to lie between two others is stored as something
between what these are stored as, and the two ends bound it (`Ends`), without a probability. Where both ends are stored alike,
which is nearly everywhere, there is one right answer.

`core.codings`, `core.compensation`, `core.stochastic_rounding` and `core.random_bits` have the definitions; nothing is shared
with them.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from ..bounds import ARITHMETIC, spacing, unit_roundoff

BLOCK = 128
_WORD = 0xFFFFFFFF
_UNIT = unit_roundoff("float32")
_ENCODING = ARITHMETIC * _UNIT  # quotients, roots and powers, relative to what a code is computed from
_DECODING = {"int8": 3 * _UNIT, "uint8": 4 * _UNIT}  # of a power, its factor, the scale times this, and the product
_LEAST_SCALE = 2.0**-94
_FLOAT16_NORMAL = 2.0**-14
_TINY = 1e-300  # keeps 0/0 away


class Ends(NamedTuple):
    """What is stored for a number, and for the ends of the interval in which it is known to be; all decoded."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """How far what is stored may be from `value`."""
        return np.maximum(self.high - self.value, self.value - self.low)


# -- random bits --------------------------------------------------------------------------------------------------------


def _mixed(word: Any) -> Any:
    """Of an int, or an array of uint64."""
    for right, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        word = (word ^ (word >> right)) * factor & _WORD
    return word


def _hashed(*words: int, start: int = 0) -> int:
    """A hash of words, one after the other."""
    for word in words:
        start = _mixed(start + word + 0x1E3779B9 & _WORD)
    return start


def key_of(name: str, layer: int | None = None) -> int:
    """Return the key of a tensor of this name, of seed 0; of one layer of a stack."""
    key = _hashed(0, zlib.crc32(name.encode()))
    return key if layer is None else _hashed(layer, start=key)


def words(key: int, update: int, field: int, microbatch: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the random words of all elements of a tensor, int64."""
    place, found = _hashed(_hashed(update, field, microbatch), start=key), []
    count = math.prod(shape)
    mixed = _mixed(np.arange(min(count, 2**16), dtype=np.uint64))
    for high in range(-(-count // 2**16)):
        shift = _hashed(high, start=place)
        factor = _hashed(0, start=shift) >> 1 | 1
        found.append(mixed * np.uint64(factor) + np.uint64(shift) & np.uint64(_WORD))
    return np.concatenate(found)[:count].astype(np.int64).reshape(shape)


def _highest(count: int, word: np.ndarray) -> np.ndarray:
    """Return the highest bits of words of 32 as numbers in [0, 1)."""
    return (word >> (32 - count)) / 2.0**count


# -- what stored numbers stand for --------------------------------------------------------------------------------------


def decoded(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Return a field, float64, from its codes and scales; from the array itself where it has no scales."""
    if scale is None:
        return stored.astype(np.float64)
    unit = _signed_unit if stored.dtype == np.int8 else _square_unit
    blocks = _blocks(stored.astype(np.float64))
    return _elements(unit(blocks) * scale.astype(np.float64)[..., None], stored.shape)


def decoding_error(dtype: str) -> float:
    """Return what a field whose array has this dtype may be off by when a device decodes it, relative to the number."""
    return _DECODING.get(dtype, 0.0)


def number(parameter: np.ndarray, kept: np.ndarray | None, compensation: str) -> np.ndarray:
    """Return the number that a parameter stands for with what is kept beside it, float64."""
    value = parameter.astype(np.float64)
    if kept is None:
        return value
    if compensation == "kahan":
        return value + kept.astype(np.float64)
    units = {"split": 1, "split8": 256}[compensation]
    bits = (parameter.view(np.uint16).astype(np.int64) << 16) + kept.astype(np.int64) * units
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def _signed_unit(code: np.ndarray) -> np.ndarray:
    return code * np.abs(code) / 127.0**2


def _square_unit(code: np.ndarray) -> np.ndarray:
    return (code / 255.0) ** 4


# -- what a number is stored as -----------------------------------------------------------------------------------------


def stored_parameter(x: np.ndarray, error: np.ndarray, dtype: str, compensation: str, bits: np.ndarray) -> Ends:
    """Return the number that a parameter stands for once x, which is off by `error` at most, is stored."""

    def store(x: np.ndarray) -> np.ndarray:
        if compensation == "stochastic":
            return _by_chance(x, dtype, bits)
        if compensation == "split8":
            return _cut(x, 256.0 * spacing("float32", x), bits, 8)
        if compensation == "split":
            return _nearest(x, "float32")
        rounded = _nearest(x, dtype)
        return rounded + _nearest(x - rounded, dtype) if compensation == "kahan" else rounded

    return Ends(store(x), store(x - error), store(x + error))


def stored_field(x: np.ndarray, error: np.ndarray, dtype: str, of_squares: bool, bits: np.ndarray | None) -> Ends:
    """Return what a field decodes to once x, which is off by `error` at most, is stored; bits: where it is by chance."""
    if dtype == "8bit":
        return _coded(x, error, bits if of_squares else None)

    def store(x: np.ndarray) -> np.ndarray:
        return _nearest(x, dtype) if bits is None else _by_chance(x, dtype, bits)

    return Ends(store(x), store(x - error), store(x + error))


def _nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float64":
        return x
    step = spacing(dtype, x)
    found: np.ndarray = np.rint(x / step) * step
    return found


def _by_chance(x: np.ndarray, dtype: str, bits: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        return _cut(x, spacing(dtype, x), bits, 16)
    small = np.abs(x) < _FLOAT16_NORMAL
    return np.where(small, _cut(x, spacing(dtype, x), bits, 20), _cut(x, spacing(dtype, x), bits, 13))


def _cut(x: np.ndarray, step: np.ndarray, bits: np.ndarray, count: int) -> np.ndarray:
    """Return x rounded to a multiple of `step`: away from zero where its rest and the highest bits make a whole one."""
    found: np.ndarray = np.sign(x) * np.floor(np.abs(x) / step + _highest(count, bits)) * step
    return found


def _coded(x: np.ndarray, error: np.ndarray, bits: np.ndarray | None) -> Ends:
    """Codes of 8 bits: signed ones to nearest, or those of squares by chance; the scale is known within the error, too."""
    blocks, off = _blocks(x), _blocks(error)
    size = np.abs(blocks)
    scales = [np.max(each, axis=-1, keepdims=True) for each in (size, np.maximum(size - off, 0.0), size + off)]
    scale, least, most = (np.maximum(each, _LEAST_SCALE) for each in scales)
    if bits is None:

        def store(x: np.ndarray, over: np.ndarray, times: np.ndarray, more: float) -> np.ndarray:
            unit = np.minimum(np.abs(x) / over * (1.0 + more), 1.0)
            code = np.minimum(np.rint(127.0 * np.sqrt(unit) * (1.0 + more)), 127.0)
            return np.sign(x) * _signed_unit(code) * times
    else:
        random = _highest(24, _blocks(bits))

        def store(x: np.ndarray, over: np.ndarray, times: np.ndarray, more: float) -> np.ndarray:
            unit = np.clip(x / over * (1.0 + more), 0.0, 1.0)
            below = np.minimum(np.floor(255.0 * unit**0.25), 254.0)
            chance = (unit * 255.0**4 - below**4) / ((below + 1.0) ** 4 - below**4) + more
            return _square_unit(np.where(x > 0.0, np.maximum(below + (random < chance), 1.0), 0.0)) * times

    def end(x: np.ndarray, sign: float) -> np.ndarray:
        """The smallest for sign -1, the largest for 1: a magnitude is the larger the smaller its scale."""
        grows = np.sign(x) * sign > 0.0
        outward, inward = store(x, least, most, _ENCODING), store(x, most, least, -_ENCODING)
        return np.where(grows, outward, inward)

    found = store(blocks, scale, scale, 0.0), end(blocks - off, -1.0), end(blocks + off, 1.0)
    return Ends(*(_elements(each, x.shape) for each in found))


def _blocks(x: np.ndarray) -> np.ndarray:
    """Return x as [rows, blocks, BLOCK], with zeros behind the end of a row."""
    rows = x.reshape(x.shape[0], -1)
    rows = np.concatenate([rows, np.zeros((rows.shape[0], -rows.shape[1] % BLOCK), rows.dtype)], axis=1)
    return rows.reshape(rows.shape[0], -1, BLOCK)


def _elements(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return blocks.reshape(shape[0], -1)[:, : int(np.prod(shape[1:]))].reshape(shape)
