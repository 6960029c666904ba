"""How the kernels load and store a part of an array: gradient and moments in one way, compensated parameters in another.

Another way to store an array changes this file and `arithmetic`, not the phases.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import decoded_parameter, encoded_parameter


@triton.jit
def load_array(pointer, offset, mask, COMPUTE: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    """Load a part of a gradient or moment, in the compute dtype."""
    return _load(pointer + offset, mask, MASKED, EVICTION).to(COMPUTE)


@triton.jit
def store_array(pointer, x, offset, mask, MASKED: tl.constexpr):
    """Store a part of a moment, in its own dtype."""
    _store(pointer + offset, x.to(pointer.dtype.element_ty), mask, MASKED)


@triton.jit
def load_parameter(
    p_ptr, k_ptr, offset, mask,
    COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Load a part of a parameter and its compensation, and return the number that they represent."""
    p = _load(p_ptr + offset, mask, MASKED, EVICTION)
    k = p
    if COMPENSATION != "none":
        k = _load(k_ptr + offset, mask, MASKED, EVICTION)
    return decoded_parameter(p, k, COMPENSATION, COMPUTE)


@triton.jit
def store_parameter(p_ptr, k_ptr, x, offset, mask, COMPENSATION: tl.constexpr, MASKED: tl.constexpr):
    """Store a part of a parameter and its compensation, which represent x."""
    p, k = encoded_parameter(x, p_ptr.dtype.element_ty, COMPENSATION)
    _store(p_ptr + offset, p, mask, MASKED)
    if COMPENSATION != "none":
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
