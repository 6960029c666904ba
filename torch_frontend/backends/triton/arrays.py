"""How the kernels load and store a part of an array: gradient and moments in one way, compensated parameters in another.

Another way to store an array changes this file and those of its arithmetic, not the phases.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import decoded_parameter, encoded_parameter
from .eight_bit import SCALED, decoded, encoded
from .rounding import stochastically_rounded


@triton.jit
def load_array(pointer, offset, mask, COMPUTE: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    """Load a part of a gradient, in the compute dtype."""
    return _load(pointer + offset, mask, MASKED, EVICTION).to(COMPUTE)


@triton.jit
def load_moment(
    pointer, scales, position, left, offset, mask,
    COMPUTE: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Load a tile of a moment, in the compute dtype.

    scales, position, left: of the tensor, and of the tile, as in `eight_bit.offsets`; for a moment in 8 bits.
    """
    if 8 == pointer.dtype.element_ty.primitive_bitwidth:
        codes = _load(pointer + offset, mask, MASKED, EVICTION)
        block = tl.arange(0, offset.shape[0])
        scale = _load(scales + position // SCALED + block, block * SCALED < left, MASKED, EVICTION)
        return decoded(codes, scale)
    else:
        return _load(pointer + offset, mask, MASKED, EVICTION).to(COMPUTE)


@triton.jit
def store_moment(pointer, scales, x, words, position, left, offset, mask, MASKED: tl.constexpr):
    """Store a tile of a moment as it was stored. words: its random bits, or None if it is rounded to nearest."""
    if 8 == pointer.dtype.element_ty.primitive_bitwidth:
        if MASKED:
            x = tl.where(mask, x, 0.0)
        codes, scale = encoded(x, words, pointer.dtype.element_ty)
        _store(pointer + offset, codes, mask, MASKED)
        block = tl.arange(0, offset.shape[0])
        _store(scales + position // SCALED + block, scale, block * SCALED < left, MASKED)
    else:
        if words is not None:
            x = stochastically_rounded(x, words, pointer.dtype.element_ty)
        _store(pointer + offset, x.to(pointer.dtype.element_ty), mask, MASKED)


@triton.jit
def load_parameter(
    p_ptr, k_ptr, offset, mask,
    COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Load a part of a parameter and its compensation, and return the number that they represent."""
    p = _load(p_ptr + offset, mask, MASKED, EVICTION)
    k = p
    if COMPENSATION != "none" and COMPENSATION != "stochastic":
        k = _load(k_ptr + offset, mask, MASKED, EVICTION)
    return decoded_parameter(p, k, COMPENSATION, COMPUTE)


@triton.jit
def store_parameter(p_ptr, k_ptr, x, words, offset, mask, COMPENSATION: tl.constexpr, MASKED: tl.constexpr):
    """Store a part of a parameter and its compensation, which represent x. words: its random bits, or None."""
    p, k = encoded_parameter(x, words, p_ptr.dtype.element_ty, COMPENSATION)
    _store(p_ptr + offset, p, mask, MASKED)
    if COMPENSATION != "none" and COMPENSATION != "stochastic":
        _store(k_ptr + offset, k, mask, MASKED)


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0.0, eviction_policy=EVICTION)
    else:
        return tl.load(pointer, eviction_policy=EVICTION)


@triton.jit
def _store(pointer, x, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, x, mask=mask)
    else:
        tl.store(pointer, x)
