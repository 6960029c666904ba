r"""Random bits for stochastic rounding: a hash of where and when they are used, the same in every framework.

    place = hash(key, update number, field, micro-batch)
    bits  = factor*mix(low) + shift mod 2^32        factor, shift = hashes of (place, high)

`key` belongs to a tensor (`tensor_key`), and an element's index in the whole tensor is 2^16*high + low: a part of a tensor has
the bits that it would have in the whole, so that pieces, shards and whole tensors round alike. mix(low) depends neither on
tensor nor time: it is a table of 2^16 words, and one product and one sum are left for each number that is rounded.

The lower a bit, the more it has in common with that of another time: what needs n bits takes the n highest (`highest`).

Words are numbers below 2^32: Python ints, int64 arrays (numpy has no products modulo 2^32 without warnings), uint32 arrays
(JAX) or int32 arrays (torch), whose sums and products wrap. Factors are below 2^31, so that no product exceeds an int64.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import InvalidArgumentError

Word = Any
"""A number below 2^32: a Python int, or an array of them."""

WORD = 0xFFFFFFFF
"""The largest word, and the mask of one."""

LOW_BITS = 16
"""Bits of an element's index that are `low`; those above are `high`."""

LOW = (1 << LOW_BITS) - 1
"""The largest `low`, and the mask of one."""

_GOLDEN = 0x1E3779B9  # the golden ratio's digits: far from a small number, which a part is


class Stream(NamedTuple):
    """What the bits of 2^16 elements of one tensor at one time are made of."""

    shift: Word
    factor: Word  # odd, below 2^31


def highest(count: int, word: Word) -> Word:
    """Return the `count` highest bits of a word as a number below 2^count; of an int32, too."""
    return (word >> (32 - count)) & ((1 << count) - 1)


def _wrapped(number: Any) -> Word:
    """Return a number modulo 2^32; arrays of 32 bits wrap by themselves."""
    return number if hasattr(number, "dtype") and number.dtype.itemsize == 4 else number & WORD


def mix(word: Word) -> Word:
    """Return a word of which each bit depends on all bits of the given one; one to one.

    Source: Christopher Wellons, https://github.com/skeeto/hash-prospector (its second constant of 31 bits).
    """
    return mix_low(word ^ highest(16, word))


def mix_low(word: Word) -> Word:
    """Return `mix(word)` of a word below 2^16, of which the first step would change nothing."""
    word = _wrapped(word * 0x21F0AAAD)
    word = word ^ highest(17, word)
    word = _wrapped(word * 0x735A2D97)
    return word ^ highest(17, word)


def _joined(word: Word, part: Word) -> Word:
    return mix(_wrapped(word + part + _GOLDEN))


def check_seed(seed: Any) -> None:
    """Raise `InvalidArgumentError` unless `seed` is an int in [0, 2^32)."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= WORD:
        raise InvalidArgumentError(f"seed={seed!r} must be an int in [0, 2**32).")


def tensor_key(seed: int, name: str) -> int:
    """Return the key of a tensor with this name, of an optimizer with this seed."""
    return int(_joined(_joined(0, seed), zlib.crc32(name.encode())))


def layer_key(key: Word, layer: Word) -> Word:
    """Return the key of one layer (from 0 on) of a stack that has this key."""
    return _joined(key, layer)


def layer_keys(keys: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the keys of the layers of a stack, of which `keys` are those, or the one of the whole stack, or none."""
    return tuple(keys) if len(keys) in (0, layers) else tuple(int(layer_key(keys[0], layer)) for layer in range(layers))


def when(update: Word, field: int = 0, microbatch: int = 0) -> Word:
    """Return the word for a time at which numbers are rounded.

    Args:
        update: number of the update.
        field: 0 is the parameter, n the nth field of the rule.
        microbatch: number of the micro-batch within the update, from 0 on.
    """
    return _joined(_joined(_joined(0, update), field), microbatch)


def place(key: Word, when: Word) -> Word:
    """Return the word of a tensor at a time."""
    return _joined(key, when)


def stream(place: Word, high: Word = 0) -> Stream:
    """Return the stream of a tensor at a time, for elements whose indices are 2^16*high and above."""
    shift = _joined(place, high)
    return Stream(shift, highest(31, _joined(shift, 0)) | 1)


def bits(of: Stream, low: Word) -> Word:
    """Return 32 random bits for each element, by the low 16 bits of their indices in the whole tensor."""
    return _wrapped(of.factor * mix_low(low) + of.shift)


def bits_at(place: Word, index: Word, high: Word = 0) -> Word:
    """Return 32 random bits for each element of a tensor at a time, by its index 2^16*high + index in the whole tensor."""
    return bits(stream(place, high + (index >> LOW_BITS)), index & LOW)
