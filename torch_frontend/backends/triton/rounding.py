"""Random bits and stochastic rounding in the kernels: `core.random_bits` and `core.stochastic_rounding`, by operation.

Words are uint32, whose products wrap.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl
from triton.language import core

_GOLDEN = tl.constexpr(0x1E3779B9)


@triton.jit
def _times(word, factor):
    """Return the product modulo 2^32, which Triton's debug mode must not take for an overflow. (Triton 3.2 has no `tl.mul`.)"""
    return core.mul(word, factor, sanitize_overflow=False)


@triton.jit
def _plus(word, other):
    return core.add(word, other, sanitize_overflow=False)


@triton.jit
def _mix(word):
    return _mix_low(word ^ (word >> 16))


@triton.jit
def _mix_low(word):
    """Return `_mix` of a word below 2^16."""
    word = _times(word, 0x21F0AAAD)
    word = word ^ (word >> 15)
    word = _times(word, 0x735A2D97)
    return word ^ (word >> 15)


@triton.jit
def _joined(word, part):
    return _mix(_plus(_plus(word, part), _GOLDEN))


@triton.jit
def place_of(key, update, field, microbatch):
    """Return the word of a tensor at a time: `core.random_bits.place` and `when`. All are scalars.

    field: 0 is the parameter, n the nth field.
    """
    when = _mix(_plus(update.to(tl.uint32), _GOLDEN))
    return _joined(key, _joined(_joined(when, field), microbatch))


@triton.jit
def mixed_indices(index, offset, starts):
    """Return what the random bits of elements have in common at all times, and whether an index has the next high word.

    An index in the whole tensor is 2^16*high + low. The high word changes at most once in a tile, which is smaller than 2^16.

    Args:
        index: int64, of the tile's first element.
        offset: int32, of the elements from there on.
        starts: the same, of elements between which the high word does not change; that it is asked for few of them saves a
            quarter of the registers.
    """
    low = (index & 0xFFFF).to(tl.int32)
    return _mix_low(((low + offset) & 0xFFFF).to(tl.uint32)), low + starts > 0xFFFF


@triton.jit
def random_words(place, index, mixed, wrapped):
    """Return 32 random bits for each element of a tile: `core.random_bits.stream` and `bits`.

    Args:
        place: from `place_of`.
        index, mixed, wrapped: of and from `mixed_indices`.
    """
    high = (index >> 16).to(tl.uint32)
    shift, next_shift = _joined(place, high), _joined(place, _plus(high, 1))
    factor, next_factor = (_joined(shift, 0) >> 1) | 1, (_joined(next_shift, 0) >> 1) | 1
    return _plus(_times(tl.where(wrapped, next_factor, factor), mixed), tl.where(wrapped, next_shift, shift))


@triton.jit
def highest(words, COUNT: tl.constexpr):
    """Return the highest bits of words as numbers below 2^COUNT, int32."""
    return (words >> (32 - COUNT)).to(tl.int32)


@triton.jit
def _cut(number, words, COUNT: tl.constexpr):
    """Return an int32 with its low bits zero, rounded up by chance."""
    return (number + highest(words, COUNT)) & -(1 << COUNT)


@triton.jit
def stochastically_rounded(x, words, DTYPE: tl.constexpr):
    """Return float32 numbers rounded to values of bfloat16 or float16: `core.stochastic_rounding`."""
    largest = 2.0**128 - 2.0**120 if DTYPE == tl.bfloat16 else 65504.0
    inside = tl.abs(x) < largest
    finite = tl.where(inside, x, 0.0)
    pattern = finite.to(tl.int32, bitcast=True)
    if DTYPE == tl.bfloat16:
        rounded = _cut(pattern, words, 16).to(tl.float32, bitcast=True)
    else:
        small = tl.abs(finite) < 2.0**-14
        units = (tl.where(small, tl.abs(finite), 0.0) * 2.0**44).to(tl.int32)
        fixed = _cut(units, words, 20).to(tl.float32) / 2.0**44
        signed = fixed.to(tl.int32, bitcast=True) | (pattern & -0x80000000)
        rounded = tl.where(small, signed, _cut(pattern, words, 13)).to(tl.float32, bitcast=True)
    return tl.where(inside, rounded, x)


@triton.jit
def without_low_bits(x, words, COUNT: tl.constexpr):
    """Return float32 numbers whose low bits are zero, rounded by chance: `core.stochastic_rounding.without_low_bits`."""
    inside = tl.abs(x) < 2.0**128 - 2.0**120
    pattern = tl.where(inside, x, 0.0).to(tl.int32, bitcast=True)
    return tl.where(inside, _cut(pattern, words, COUNT).to(tl.float32, bitcast=True), x)
