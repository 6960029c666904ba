"""The bias corrections of tensors whose numbers of updates are on the device: a small kernel before the one that updates.

It computes in float64, once a tensor. The kernel that updates would do it once an item, and an item waits for it.
"""

# pyright: reportArgumentType=false, reportInvalidTypeForm=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import bias_correction

AT_ONCE = tl.constexpr(32)
"""Tensors of a program: one for each thread."""


@triton.jit(do_not_specialize=["tensor_count", "first1", "log1", "first2", "log2"])
def store_bias_corrections(
    tensors, corrections, tensor_count, numbers, first1, log1, first2, log2, WIDTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """Store c1 and c2 of each tensor in `corrections`, COMPUTE [tensor_count, 2]; see `kernels.update_group` for the rest.

    WIDTH: number of columns of the table `tensors`.
    """
    if numbers is not None:
        first1, log1 = tl.load(numbers), tl.load(numbers + 1)
        first2, log2 = tl.load(numbers + 2), tl.load(numbers + 3)
    tensor = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = tensor < tensor_count
    step_ptr = tl.load(tensors + tensor.to(tl.int64) * WIDTH + 5, mask=there, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=there, other=0.0)
    tl.store(corrections + tensor * 2, bias_correction(first1, log1, step, COMPUTE), mask=there)
    tl.store(corrections + tensor * 2 + 1, bias_correction(first2, log2, step, COMPUTE), mask=there)
