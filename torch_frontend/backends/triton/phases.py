"""The work of a program on one item of a tensor in each of the two phases of `kernels`, tile by tile.

Whole tiles are read without a mask, by accesses of 16 bytes for every size of the tensor; the remainder is read in masked
tiles of `TAIL` elements. Offsets have 64 bits, and 32 bits within a tile. The arithmetic is in `arithmetic`. Where moments are
in 8 bits, n, `base` and the sizes of tiles are positions of `eight_bit`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import bounded, next_exp_avg, next_exp_avg_sq, prepared_gradient, squared_ratio, stepped
from .arrays import load_array, load_moment, load_parameter, store_moment, store_parameter
from .eight_bit import SCALED, element_at, offsets, starts
from .rounding import mixed_indices, place_of, random_words


@triton.jit
def _by_fours(x, SIZE: tl.constexpr):
    """Return the sums of four neighbours, which one thread has: a quarter of the registers of a running sum."""
    return tl.sum(tl.reshape(x, (SIZE // 4, 4)), 1)


@triton.jit
def _measured_tile(
    g_ptr, v_ptr, p_ptr, k_ptr, v_scales, position, left, columns, c2, floor, decay,
    FIRST: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr,
    KEEP: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return of one tile g*g/max(v', eps^2); g-g, which is 0 where g is finite and NaN where it is not; and g*g as given."""
    offset, mask = offsets(position, left, columns, ROWS, SIZE)
    g = load_array(g_ptr, offset, mask, COMPUTE, MASKED, KEEP)
    v = load_moment(v_ptr, v_scales, position, left, offset, mask, COMPUTE, MASKED, KEEP)
    square = g * g
    parameter = g
    if L2 and FIRST:
        parameter = load_parameter(p_ptr, k_ptr, offset, mask, COMPENSATION, COMPUTE, MASKED, KEEP)
    g = prepared_gradient(g, parameter, decay, FIRST, L2, MAXIMIZE)
    entering = bounded(g, g_ptr.dtype.element_ty)
    ratio = squared_ratio(g, next_exp_avg_sq(v, entering, c2, FIRST, ZERO2), floor)
    check = g - g
    if MASKED:  # g is 0 outside
        ratio, check = tl.where(mask, ratio, 0.0), tl.where(mask, check, 0.0)
    return ratio, check, square


@triton.jit
def measured_item(
    g_ptr, v_ptr, p_ptr, k_ptr, v_scales, base, n, columns, applied_ptr, c2, floor, decay,
    FIRST: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, COMPUTE: tl.constexpr,
    KEEP: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the partial sums of ratios and squares of one item; store 0 at `applied_ptr`, if given, for a non-finite g."""
    RAGGED: tl.constexpr = ROWS != 0 and ROWS != SCALED
    blocks = tl.minimum((n - base) // BLOCK, TILES).to(tl.int32)
    ratios = tl.zeros((BLOCK // 4,), COMPUTE)
    checks = tl.zeros((BLOCK // 4,), COMPUTE)
    squares = tl.zeros((BLOCK // 4,), COMPUTE)
    for tile in tl.range(0, blocks, num_stages=STAGES, loop_unroll_factor=UNROLL):
        position = base + tile * BLOCK
        at = element_at(position, columns, ROWS)
        ratio, check, square = _measured_tile(
            g_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, v_scales, position, BLOCK, columns, c2, floor, decay,
            FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, ROWS, RAGGED, BLOCK,
        )  # fmt: skip
        ratios += _by_fours(ratio, BLOCK)
        checks += _by_fours(check, BLOCK)
        squares += _by_fours(square, BLOCK)
    partial, finite, total = tl.sum(ratios, 0), tl.sum(checks, 0), tl.sum(squares, 0)
    if blocks < TILES:
        left = (n - base).to(tl.int32) - blocks * BLOCK
        tail_ratios = tl.zeros((TAIL // 4,), COMPUTE)
        tail_checks = tl.zeros((TAIL // 4,), COMPUTE)
        tail_squares = tl.zeros((TAIL // 4,), COMPUTE)
        for start in range(0, left, TAIL):
            position = base + blocks * BLOCK + start
            at = element_at(position, columns, ROWS)
            ratio, check, square = _measured_tile(
                g_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, v_scales, position, left - start, columns, c2, floor, decay,
                FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, ROWS, True, TAIL,
            )  # fmt: skip
            tail_ratios += _by_fours(ratio, TAIL)
            tail_checks += _by_fours(check, TAIL)
            tail_squares += _by_fours(square, TAIL)
        partial += tl.sum(tail_ratios, 0)
        finite += tl.sum(tail_checks, 0)
        total += tl.sum(tail_squares, 0)
    if applied_ptr is not None:
        if finite != finite:
            tl.store(applied_ptr, 0.0)
    return partial, total


@triton.jit
def _written_tile(
    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, m_scales, v_scales, position, left, columns, index, at, p_place, v_place,
    c1, c2, eta, eps, floor, decay,
    ACTION: tl.constexpr, FIRST: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, STOCHASTIC: tl.constexpr,
    COMPUTE: tl.constexpr, PASS: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write one tile; return its g*g/max(v', eps^2) for SUM "ratios", or its g*g as given for "squares".

    index, at: of the tensor's first element in the whole one, and of the tile's in this tensor.
    p_place, v_place: of the random bits, from `rounding.place_of`.
    """
    offset, mask = offsets(position, left, columns, ROWS, SIZE)
    m = load_moment(m_ptr, m_scales, position, left, offset, mask, COMPUTE, MASKED, PASS)
    v = load_moment(v_ptr, v_scales, position, left, offset, mask, COMPUTE, MASKED, PASS)
    parameter = m
    if ACTION != "accumulate" or (L2 and FIRST):
        parameter = load_parameter(p_ptr, k_ptr, offset, mask, COMPENSATION, COMPUTE, MASKED, PASS)
    RANDOM: tl.constexpr = COMPENSATION == "split8" or COMPENSATION == "stochastic"
    if STOCHASTIC or RANDOM:
        mixed, wrapped = mixed_indices(index + at, offset, starts(offset, ROWS, SIZE))
    p_words = None
    v_words = None
    term = m
    if ACTION != "apply":
        g = load_array(g_ptr, offset, mask, COMPUTE, MASKED, PASS)
        term = g * g
        g = prepared_gradient(g, parameter, decay, FIRST, L2, MAXIMIZE)
        entering = bounded(g, g_ptr.dtype.element_ty)
        m = next_exp_avg(m, entering, c1, FIRST, ZERO1)
        v = next_exp_avg_sq(v, entering, c2, FIRST, ZERO2)
        if ROWS == 0:
            if STOCHASTIC:
                v_words = random_words(v_place, index + at, mixed, wrapped)
            store_moment(m_ptr, m_scales, m, None, position, left, offset, mask, MASKED)
            store_moment(v_ptr, v_scales, v, v_words, position, left, offset, mask, MASKED)
        if SUM == "ratios":
            term = squared_ratio(g, v, floor)
            if MASKED:
                term = tl.where(mask, term, 0.0)
    if ACTION != "accumulate":
        x = stepped(parameter, m, v, eta, eps, decay, L2)
        if RANDOM:
            p_words = random_words(p_place, index + at, mixed, wrapped)
        store_parameter(p_ptr, k_ptr, x, p_words, offset, mask, COMPENSATION, MASKED)
    if ACTION != "apply":
        if ROWS != 0:
            store_moment(m_ptr, m_scales, m, None, position, left, offset, mask, MASKED)
            if STOCHASTIC:
                v_words = random_words(v_place, index + at, mixed, wrapped)
            store_moment(v_ptr, v_scales, v, v_words, position, left, offset, mask, MASKED)
    return term


@triton.jit
def written_item(
    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, m_scales, v_scales, base, n, columns, index, key, update, microbatch,
    c1, c2, eta, eps, floor, decay,
    ACTION: tl.constexpr, FIRST: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, STOCHASTIC: tl.constexpr,
    COMPUTE: tl.constexpr, PASS: tl.constexpr, SUM: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write one item; return the partial sum of "ratios" or of "squares" that the measure phase would return, by SUM."""
    RAGGED: tl.constexpr = ROWS != 0 and ROWS != SCALED
    p_place = None
    v_place = None
    if update is not None:
        p_place, v_place = place_of(key, update, 0, 0), place_of(key, update, 2, microbatch)
    blocks = tl.minimum((n - base) // BLOCK, TILES).to(tl.int32)
    terms = tl.zeros((BLOCK // 4,), COMPUTE)
    for tile in range(blocks):
        position = base + tile * BLOCK
        at = element_at(position, columns, ROWS)
        term = _written_tile(
            g_ptr + at, m_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, m_scales, v_scales, position, BLOCK, columns,
            index, at, p_place, v_place, c1, c2, eta, eps, floor, decay,
            ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, STOCHASTIC, COMPUTE, PASS, SUM, ROWS, RAGGED, BLOCK,
        )  # fmt: skip
        if SUM != "":
            terms += _by_fours(term, BLOCK)
    partial = tl.sum(terms, 0)
    if blocks < TILES:
        left = (n - base).to(tl.int32) - blocks * BLOCK
        tail_terms = tl.zeros((TAIL // 4,), COMPUTE)
        for start in range(0, left, TAIL):
            position = base + blocks * BLOCK + start
            at = element_at(position, columns, ROWS)
            term = _written_tile(
                g_ptr + at, m_ptr + at, v_ptr + at, p_ptr + at, k_ptr + at, m_scales, v_scales, position, left - start,
                columns, index, at, p_place, v_place, c1, c2, eta, eps, floor, decay,
                ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, STOCHASTIC, COMPUTE, PASS, SUM, ROWS, True, TAIL,
            )  # fmt: skip
            if SUM != "":
                tail_terms += _by_fours(term, TAIL)
        partial += tl.sum(tail_terms, 0)
    return partial
