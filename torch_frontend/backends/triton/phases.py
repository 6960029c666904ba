"""The work of a program on one item of a tensor in each of the two phases of `kernels`, tile by tile.

Whole tiles are read without a mask, by accesses of 16 bytes for every size of the tensor; the remainder is read in masked
tiles of `TAIL` elements. Offsets have 64 bits, and 32 bits within a tile. The arithmetic is in `arithmetic`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import (
    load_parameter,
    next_exp_avg,
    next_exp_avg_sq,
    prepared_gradient,
    squared_ratio,
    stepped,
    store_parameter,
)


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


@triton.jit
def _measured_tile(
    g_ptr, v_ptr, p_ptr, k_ptr, left, c2, floor, decay,
    FIRST: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr,
    KEEP: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return g*g/max(v', eps^2) of one tile, and g-g, which is 0 where g is finite and NaN where it is not."""
    offset = tl.arange(0, SIZE)
    mask = offset < left
    g = _load(g_ptr + offset, mask, MASKED, KEEP).to(COMPUTE)
    v = _load(v_ptr + offset, mask, MASKED, KEEP).to(COMPUTE)
    parameter = g
    if L2 and FIRST:
        k = _load(k_ptr + offset, mask, MASKED, KEEP)
        parameter = load_parameter(_load(p_ptr + offset, mask, MASKED, KEEP), k, COMPENSATION, COMPUTE)
    g = prepared_gradient(g, parameter, decay, FIRST, L2, MAXIMIZE)
    ratio = squared_ratio(g, next_exp_avg_sq(v, g, c2, FIRST, ZERO2), floor)
    check = g - g
    if MASKED:
        ratio, check = tl.where(mask, ratio, 0.0), tl.where(mask, check, 0.0)
    return ratio, check


@triton.jit
def measured_item(
    g_ptr, v_ptr, p_ptr, k_ptr, base, n, applied_ptr, c2, floor, decay,
    FIRST: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr,
    KEEP: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the partial sum of one item; store 0 at `applied_ptr`, if given, when a gradient is not finite."""
    blocks = tl.minimum((n - base) // BLOCK, TILES).to(tl.int32)
    ratios = tl.zeros((BLOCK,), COMPUTE)
    checks = tl.zeros((BLOCK,), COMPUTE)
    for tile in tl.range(0, blocks, num_stages=STAGES, loop_unroll_factor=UNROLL):
        at = base + tile * BLOCK
        ratio, check = _measured_tile(
            g_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, BLOCK, c2, floor, decay,
            FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, False, BLOCK,
        )  # fmt: skip
        ratios += ratio
        checks += check
    partial, finite = tl.sum(ratios, 0), tl.sum(checks, 0)
    if blocks < TILES:
        left = (n - base).to(tl.int32) - blocks * BLOCK
        for start in range(0, left, TAIL):
            at = base + blocks * BLOCK + start
            ratio, check = _measured_tile(
                g_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, left - start, c2, floor, decay,
                FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, True, TAIL,
            )  # fmt: skip
            partial += tl.sum(ratio, 0)
            finite += tl.sum(check, 0)
    if applied_ptr is not None:
        if finite != finite:
            tl.store(applied_ptr, 0.0)
    return partial


@triton.jit
def _written_tile(
    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, left, c1, c2, eta, eps, floor, decay,
    ACTION: tl.constexpr, FIRST: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr,
    COMPUTE: tl.constexpr, PASS: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write one tile; for "accumulate" return its g*g/max(v', eps^2)."""
    offset = tl.arange(0, SIZE)
    mask = offset < left
    m = _load(m_ptr + offset, mask, MASKED, PASS).to(COMPUTE)
    v = _load(v_ptr + offset, mask, MASKED, PASS).to(COMPUTE)
    parameter = m
    if ACTION != "accumulate" or (L2 and FIRST):
        p = _load(p_ptr + offset, mask, MASKED, PASS)
        k = p
        if COMPENSATION != "none":
            k = _load(k_ptr + offset, mask, MASKED, PASS)
        parameter = load_parameter(p, k, COMPENSATION, COMPUTE)
    ratio = m
    if ACTION != "apply":
        g = _load(g_ptr + offset, mask, MASKED, PASS).to(COMPUTE)
        g = prepared_gradient(g, parameter, decay, FIRST, L2, MAXIMIZE)
        m = next_exp_avg(m, g, c1, FIRST, ZERO1)
        v = next_exp_avg_sq(v, g, c2, FIRST, ZERO2)
        _store(m_ptr + offset, m.to(m_ptr.dtype.element_ty), mask, MASKED)
        _store(v_ptr + offset, v.to(v_ptr.dtype.element_ty), mask, MASKED)
        ratio = squared_ratio(g, v, floor)
        if MASKED:
            ratio = tl.where(mask, ratio, 0.0)
    if ACTION != "accumulate":
        x = stepped(parameter, m, v, eta, eps, decay, L2)
        p, k = store_parameter(x, p_ptr.dtype.element_ty, COMPENSATION)
        _store(p_ptr + offset, p, mask, MASKED)
        if COMPENSATION != "none":
            _store(k_ptr + offset, k, mask, MASKED)
    return ratio


@triton.jit
def written_item(
    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, base, n, c1, c2, eta, eps, floor, decay,
    ACTION: tl.constexpr, FIRST: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr,
    COMPUTE: tl.constexpr, PASS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Write one item; for "accumulate" return the partial sum that the measure phase would return."""
    blocks = tl.minimum((n - base) // BLOCK, TILES).to(tl.int32)
    ratios = tl.zeros((BLOCK,), COMPUTE)
    for tile in range(blocks):
        at = base + tile * BLOCK
        ratio = _written_tile(
            g_ptr + at, m_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, BLOCK, c1, c2, eta, eps, floor, decay,
            ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, PASS, False, BLOCK,
        )  # fmt: skip
        if ACTION == "accumulate":
            ratios += ratio
    partial = tl.sum(ratios, 0)
    if blocks < TILES:
        left = (n - base).to(tl.int32) - blocks * BLOCK
        for start in range(0, left, TAIL):
            at = base + blocks * BLOCK + start
            ratio = _written_tile(
                g_ptr + at, m_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, left - start,
                c1, c2, eta, eps, floor, decay,
                ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, PASS, True, TAIL,
            )  # fmt: skip
            if ACTION == "accumulate":
                partial += tl.sum(ratio, 0)
    return partial
