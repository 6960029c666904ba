r"""The kernels: one updates all tensors of a parameter group, the other a single tensor. Both are deterministic.

A tensor is divided into *items* of `TILES` tiles of `BLOCK` elements. There are two phases of work on an item:

    measure    reads g and v, and stores one partial sum of g*g/max(v', eps^2) in the item's slot      (v' after the update)
    write      reads g, m, v, p, k and writes m, v, p, k

The program that finishes the last measure item of a tensor adds the slots in a fixed order: the sum does not depend on the
order in which programs ran, and no floating-point number is added atomically. A tensor is written only after all of its
gradient was read, so that a non-finite gradient can be skipped. Rules that do not clip their update have no measure phase.

**Tickets.** Programs take items in the order of the table by incrementing one integer. A write item waits for the sum of its
tensor. All measure items of a tensor precede its write items in the table, so the programs that it waits for are running
already, and measure items never wait: there is no deadlock, however few programs are resident. The program that leaves last
resets every counter to zero for the next launch.

**Conditions.** Conditions on constants have an `if` of their own around the others: Triton 3.2 evaluates both sides of `and`,
and would increment a counter, or write to an absent pointer. (It also treats a call whose result is not assigned as an early
return.)
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import bias_correction, clipped_learning_rate
from .eight_bit import elements, row_length
from .hand_off import SUMMED_AT_ONCE, announce, arrive, is_last_to_leave, take_ticket, wait
from .phases import measured_item, written_item

COLUMNS = tl.constexpr(9)
"""Columns of the tensor table: addresses of g, m, v, p, k and t, number of elements, first slot, number of items."""

COLUMNS_OF_RANDOM_BITS = tl.constexpr(5)
"""Where something is rounded stochastically, further ones: addresses of the scales of m and v, length of a row, index of the
first element in the whole tensor, key of the random bits."""

NUMBERS = tl.constexpr(8)
"""Number of scalars of a launch: 1-beta1 (or c1), log(beta1), 1-beta2 (or c2), log(beta2), lr, eps, floor, decay."""


@triton.jit(
    do_not_specialize=[
        *("item_count", "tensor_count", "first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay", "update")
    ],
    do_not_specialize_on_alignment=["norms", "applied_ptr"],
)
def update_group(
    items, tensors, partials, squares, corrections, norms, counters, item_count, tensor_count, applied_ptr,
    numbers, first1, log1, first2, log2, lr, eps, floor, decay, update,
    PHASES: tl.constexpr, CLIP: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    EACH: tl.constexpr, ALIGNMENT: tl.constexpr, HINTS: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, K: tl.constexpr, COMPUTE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    r"""Update every tensor of a table: `core.update.update` with first=True.

        m += c1*(g-m)      v += c2*(g*g-v)      eta = lr / max(1, sqrt(mean(g*g / max(v, eps^2))))       (CLIP)
        p <- p - eta*(m/(sqrt(v)+eps) + decay*p)                 (without CLIP eta = lr; with L2: g += decay*p instead)

    Args:
        items: int32, [item_count, 3]: phase (0 measure, 1 write), tensor, number of the item in its tensor; in ticket order.
        tensors: int64, [tensor_count, `COLUMNS`], and `COLUMNS_OF_RANDOM_BITS` more.
        partials: COMPUTE, a slot for each item of the table's tensors; two with norms.
        squares: COMPUTE, [tensor_count], the mean squares; written by measure, read by write.
        corrections: COMPUTE, [tensor_count, 2], c1 and c2 of each tensor, of `corrections.store_bias_corrections`; None if they
            are among the scalars, the same for all.
        norms: COMPUTE, [tensor_count], or None: the sum of each gradient's squares is stored there.
        counters: int32, zero: ticket, programs that have left, then for each tensor the items that have arrived and whether
            its mean square is ready. They are zero again at the end.
        applied_ptr: float32, or None: one flag for all tensors, or with EACH one for each tensor. Measure stores 0 there if a
            gradient is not finite; write skips tensors whose flag is 0.
        numbers: COMPUTE, [`NUMBERS`]; None if the scalars are arguments.
        update: number of the update, for the random bits, unless it is on the device; None if nothing is rounded by chance.
        PHASES: "measure", "write", or "both" with tickets.
        ZERO1, ZERO2: whether beta1 and beta2 are known to be 0: `core.rules.rule.forgotten`. No other value of
            the scalars is compiled in.
        STOCHASTIC: whether v is rounded stochastically.
        ROWS: as in `eight_bit`.
        ALIGNMENT: bytes that every address is a multiple of.
    """
    if numbers is not None:
        first1, first2 = tl.load(numbers), tl.load(numbers + 2)
        lr, eps = tl.load(numbers + 4), tl.load(numbers + 5)
        floor, decay = tl.load(numbers + 6), tl.load(numbers + 7)
    KEEP: tl.constexpr = "evict_last" if HINTS and PHASES == "both" else ""
    PASS: tl.constexpr = "evict_first" if HINTS else ""
    SUM: tl.constexpr = "squares" if norms is not None and not CLIP else ""
    WIDTH: tl.constexpr = COLUMNS if update is None else COLUMNS + COLUMNS_OF_RANDOM_BITS
    if PHASES == "both":  # noqa: SIM108  (Triton compiles both sides of a conditional expression)
        ticket = take_ticket(counters)
    else:
        ticket = tl.program_id(0)
    while ticket < item_count:
        entry = items + ticket.to(tl.int64) * 3
        phase = tl.load(entry)
        tensor = tl.load(entry + 1)
        item = tl.load(entry + 2)
        row = tensors + tensor.to(tl.int64) * WIDTH
        g_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(G)), ALIGNMENT)
        m_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(M)), ALIGNMENT)
        v_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(V)), ALIGNMENT)
        p_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(P)), ALIGNMENT)
        k_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(K)), ALIGNMENT)
        step_ptr = tl.load(row + 5).to(tl.pointer_type(tl.float32))
        n = tl.load(row + 6)
        base = item.to(tl.int64) * (TILES * BLOCK)
        flag_ptr = applied_ptr
        if EACH:
            flag_ptr += tensor
        arrived = counters + 2 + tensor * 2
        m_scales, v_scales, columns, index, key = update, update, update, update, update
        number = update
        if update is not None:
            m_scales = tl.load(row + 9).to(tl.pointer_type(tl.float32))
            v_scales = tl.load(row + 10).to(tl.pointer_type(tl.float32))
            columns = row_length(tl.load(row + 11), ROWS)
            index = tl.load(row + 12)
            key = tl.load(row + 13).to(tl.uint32)
            if corrections is not None:
                number = (tl.load(step_ptr) + 1.0).to(tl.int32)
        c1 = first1
        c2 = first2
        if corrections is not None:
            c1 = tl.load(corrections + tensor * 2)
            c2 = tl.load(corrections + tensor * 2 + 1)
        if PHASES != "write":
            if phase == 0:
                slot = tl.load(row + 7)
                if norms is not None:
                    slot *= 2
                count = tl.load(row + 8).to(tl.int32)
                partial, square = measured_item(
                    g_ptr, v_ptr, p_ptr, k_ptr, v_scales, base, n, columns, flag_ptr, c2, floor, decay,
                    True, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, TILES, BLOCK, TAIL, UNROLL, STAGES, ROWS,
                )  # fmt: skip
                if CLIP:
                    last, total, norm = arrive(
                        partials + slot, item, count, partial, square, arrived, norms is not None, COMPUTE
                    )
                    if last:
                        if norms is not None:
                            tl.store(norms + tensor, norm)
                        tl.store(squares + tensor, total / elements(n, columns, ROWS).to(COMPUTE))
                        if PHASES == "both":
                            announce(arrived + 1)
        if PHASES != "measure":
            if phase == 1:
                if PHASES == "both":
                    wait(arrived + 1)
                usable = True
                if flag_ptr is not None:
                    usable = tl.load(flag_ptr) != 0.0
                if usable:
                    eta = lr
                    if CLIP:
                        eta = clipped_learning_rate(lr, tl.load(squares + tensor, cache_modifier=".cg"))
                    partial = written_item(
                        g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, m_scales, v_scales, base, n, columns, index, key, number, 0,
                        c1, c2, eta, eps, floor, decay, "update", True, ZERO1, ZERO2, L2, MAXIMIZE,
                        COMPENSATION, STOCHASTIC, COMPUTE, PASS, SUM, TILES, BLOCK, TAIL, ROWS,
                    )  # fmt: skip
                    if SUM != "":
                        slot = tl.load(row + 7)
                        count = tl.load(row + 8).to(tl.int32)
                        last, total, _ = arrive(partials + slot, item, count, partial, 0.0, arrived, False, COMPUTE)
                        if last:
                            tl.store(norms + tensor, total)
        if PHASES == "both":
            ticket = take_ticket(counters)
        else:
            ticket += tl.num_programs(0)
    if PHASES == "both":
        if is_last_to_leave(counters + 1):
            for start in range(0, tensor_count, SUMMED_AT_ONCE):
                tensor = start + tl.arange(0, SUMMED_AT_ONCE)
                tl.store(counters + 3 + tensor * 2, tl.zeros_like(tensor), mask=tensor < tensor_count)
            tl.store(counters, 0)
            tl.store(counters + 1, 0)


@triton.jit(
    do_not_specialize=[
        *("g", "m", "v", "p", "k", "n", "item_count", "first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay"),
        *("columns", "index_high", "index_low", "key", "update", "microbatch"),
    ],
    do_not_specialize_on_alignment=["step_ptr", "square_before", "norm_ptr", "applied_ptr", "m_scales", "v_scales"],
)
def update_tensor(
    g: tl.int64, m: tl.int64, v: tl.int64, p: tl.int64, k: tl.int64, n: tl.int64, item_count: tl.int32, step_ptr,
    partials, counters, square_before, square_after, norm_ptr, applied_ptr,
    numbers, first1, log1, first2, log2, lr, eps, floor, decay,
    m_scales, v_scales, columns, index_high, index_low, key, update, microbatch,
    ACTION: tl.constexpr, FIRST: tl.constexpr, CLIP: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr, HINTS: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, K: tl.constexpr, COMPUTE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    r"""Update, accumulate or apply for one tensor, by ACTION, as in `core.update`; the mathematics is that of `update_group`.

        FIRST      m += c1*(g-m)    v += c2*(g*g-v)
        otherwise  m += c1*g        v += c2*g*g                    (a later micro-batch of the same update)
        CLIP       mean_square = square_before + mean(g*g / max(v, eps^2))        eta = lr / max(1, sqrt(mean_square))

    "update" measures and writes with tickets if it clips or checks; "accumulate" and "apply" have one phase.

    Args:
        g, m, v, p, k: the addresses. "apply" does not read g.
        step_ptr: float32 0-d, t of the last update; None if c1 and c2 are given.
        square_before: 0-d, the summed mean square of earlier micro-batches (for "apply", of all), or None for 0.
        square_after: COMPUTE 0-d, written by "update" and "accumulate" if the rule clips.
        norm_ptr: COMPUTE 0-d, or None: "update" stores the sum of the gradient's squares there.
        partials, counters: as in `update_group`, for one tensor; twice as many slots with norm_ptr.
        m_scales, v_scales: float32, the scales; None without codes.
        columns, index_high, index_low, key: as in `COLUMNS_OF_RANDOM_BITS`, int32 each: a key and the low word of an index are
            the same bits. None, as update, if nothing is rounded by chance.
        microbatch: number of earlier micro-batches of the update.
        applied_ptr, numbers, the scalars, update, ZERO1, ZERO2, STOCHASTIC, ROWS, ALIGNMENT: as in `update_group`. The
            distribution of a tile over threads depends only on ALIGNMENT and ROWS in both kernels, so that sums have the same
            order and the same bits.
    """
    if numbers is not None:
        first1, log1 = tl.load(numbers), tl.load(numbers + 1)
        first2, log2 = tl.load(numbers + 2), tl.load(numbers + 3)
        lr, eps = tl.load(numbers + 4), tl.load(numbers + 5)
        floor, decay = tl.load(numbers + 6), tl.load(numbers + 7)
    n = n.to(tl.int64)
    g_ptr = tl.multiple_of(g.to(tl.pointer_type(G)), ALIGNMENT)
    m_ptr = tl.multiple_of(m.to(tl.pointer_type(M)), ALIGNMENT)
    v_ptr = tl.multiple_of(v.to(tl.pointer_type(V)), ALIGNMENT)
    p_ptr = tl.multiple_of(p.to(tl.pointer_type(P)), ALIGNMENT)
    k_ptr = tl.multiple_of(k.to(tl.pointer_type(K)), ALIGNMENT)
    TWO_PHASES: tl.constexpr = ACTION == "update" and (CLIP or applied_ptr is not None)
    RATIOS: tl.constexpr = "ratios" if CLIP and ACTION == "accumulate" else ""
    SUM: tl.constexpr = "squares" if norm_ptr is not None and not TWO_PHASES else RATIOS
    KEEP: tl.constexpr = "evict_last" if HINTS else ""
    PASS: tl.constexpr = "evict_first" if HINTS else ""
    c1 = first1
    c2 = first2
    if step_ptr is not None:
        step = tl.load(step_ptr)
        c1 = bias_correction(first1, log1, step, COMPUTE)
        c2 = bias_correction(first2, log2, step, COMPUTE)
    index = update
    number = update
    if update is not None:
        index = (index_high.to(tl.int64) << 32) | index_low.to(tl.uint32).to(tl.int64)
        columns = row_length(columns, ROWS)
        key = key.to(tl.uint32)
        if step_ptr is not None:
            number = (step + 1.0).to(tl.int32)
    before = 0.0
    if square_before is not None:
        before = tl.load(square_before).to(COMPUTE)
    ticket_count = item_count
    if TWO_PHASES:
        ticket_count = item_count * 2
        ticket = take_ticket(counters)
        tl.debug_barrier()  # without it LLVM merges this ticket with the next; on AMD the counting thread then diverges
    else:
        ticket = tl.program_id(0)
    while ticket < ticket_count:
        measures = False
        if TWO_PHASES:
            measures = ticket < item_count
        if measures:
            partial, square = measured_item(
                g_ptr, v_ptr, p_ptr, k_ptr, v_scales, ticket.to(tl.int64) * (TILES * BLOCK), n, columns, applied_ptr,
                c2, floor, decay, FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, COMPUTE, KEEP, TILES, BLOCK, TAIL, UNROLL, STAGES,
                ROWS,
            )  # fmt: skip
            last, total, norm = arrive(
                partials, ticket, item_count, partial, square, counters + 2, norm_ptr is not None, COMPUTE
            )
            if last:
                if norm_ptr is not None:
                    tl.store(norm_ptr, norm)
                tl.store(square_after, before + total / elements(n, columns, ROWS).to(COMPUTE))
                announce(counters + 3)
        else:
            item = ticket
            usable = True
            eta = lr
            if TWO_PHASES:
                item = item_count * 2 - 1 - ticket  # in reverse: what was measured last is still in the cache
                wait(counters + 3)
                if applied_ptr is not None:
                    usable = tl.load(applied_ptr, cache_modifier=".cg") != 0.0
                if CLIP:
                    eta = clipped_learning_rate(lr, tl.load(square_after, cache_modifier=".cg"))
            elif CLIP and ACTION == "apply":
                eta = clipped_learning_rate(lr, before)
            if usable:
                partial = written_item(
                    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, m_scales, v_scales, item.to(tl.int64) * (TILES * BLOCK), n, columns,
                    index, key, number, microbatch, c1, c2, eta, eps, floor, decay, ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE,
                    COMPENSATION, STOCHASTIC, COMPUTE, PASS, SUM, TILES, BLOCK, TAIL, ROWS,
                )  # fmt: skip
                if SUM != "":
                    last, total, _ = arrive(partials, item, item_count, partial, 0.0, counters + 2, False, COMPUTE)
                    if last:
                        if SUM == "ratios":
                            tl.store(square_after, before + total / elements(n, columns, ROWS).to(COMPUTE))
                        else:
                            tl.store(norm_ptr, total)
        if TWO_PHASES:
            ticket = take_ticket(counters)
        else:
            ticket += tl.num_programs(0)
    if TWO_PHASES:
        if is_last_to_leave(counters + 1):
            tl.store(counters, 0)
            tl.store(counters + 1, 0)
            tl.store(counters + 3, 0)
