r"""Random bits for stochastic rounding: a hash of where and when they are used, the same in every framework.

    when  = hash(update number, field, micro-batch)
    bits  = mix(factor*low + shift mod 2^32)        factor, shift = hashes of (key, when, high)

`key` belongs to a tensor (`tensor_key`), and (high, low) are the two words of an element's index in the whole tensor: a part
of a tensor has the bits that it would have in the whole, so that pieces, shards and whole tensors round alike. Every function
is one to one in each of its words: the same tensor never has the same bits twice.

Words are numbers below 2^32: Python ints, int64 arrays (numpy and torch, which have no products modulo 2^32 of their own) or
uint32 arrays (JAX). Multipliers are below 2^31, so that no product exceeds an int64.
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

_GOLDEN = 0x1E3779B9  # the golden ratio's digits: far from a small number, which a part is


class Stream(NamedTuple):
    """The bits of one tensor at one time are mix(factor*low + shift), with the low word of each element's index."""

    shift: Word
    factor: Word  # odd, below 2^31


def _wrapped(number: Any) -> Word:
    """Return a number modulo 2^32; unsigned arrays of 32 bits wrap by themselves."""
    return number if hasattr(number, "dtype") and number.dtype.itemsize == 4 else number & WORD


def mix(word: Word) -> Word:
    """Return a word of which each bit depends on all bits of the given one; one to one.

    Source: Christopher Wellons, https://github.com/skeeto/hash-prospector (its second constant of 31 bits).
    """
    word = word ^ (word >> 16)
    word = _wrapped(word * 0x21F0AAAD)
    word = word ^ (word >> 15)
    word = _wrapped(word * 0x735A2D97)
    return word ^ (word >> 15)


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


def stream(key: Word, when: Word, high: Word = 0) -> Stream:
    """Return the stream of a tensor at a time, for elements whose indices have this high word."""
    when = _joined(when, high)
    return Stream(mix(key ^ when), (mix(_wrapped(key + when)) >> 1) | 1)


def bits(of: Stream, low: Word) -> Word:
    """Return 32 random bits for each element, by the low words of their indices in the whole tensor."""
    return mix(_wrapped(of.factor * low + of.shift))
