r"""The kernels: one launch for all tensors of a parameter group, and one for a single tensor. Both are deterministic.

A tensor is cut into *items* of `TILES` tiles of `BLOCK` elements. An item is worked on in one of two phases:

    measure    reads g and v, and leaves one partial sum of g*g/max(v', eps^2) in a slot of its own      (v' as updated)
    write      reads g, m, v, p, k and writes m, v, p, k

The item of a tensor that is measured last adds the slots up, always in the same order: the sum does not depend on which
program came when, and no floating-point number is ever added atomically. Nothing is written before every gradient of the
tensor was read, so that a non-finite one can be found in time. Rules that do not clip their update have no measure phase.

**Tickets.** Programs take items in the order of the table by counting up one integer. A write item waits for the sum of its
tensor; the table has all measure items of a tensor before its first write item, so that whoever it waits for runs
already, and never waits itself: no deadlock, however few programs are resident. The program that leaves last sets every
counter back to zero for the next launch.

**Conditions.** What is known when a kernel is compiled has an `if` of its own, with the rest inside: Triton 3.2 evaluates both
sides of `and`, and would count up a counter, or write to no pointer, that is not meant. (It also takes a call whose result
is not assigned for an early return.)
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

from .arithmetic import bias_correction, clipped_learning_rate
from .hand_off import SUMMED_AT_ONCE, announce, arrive, left_last, take_ticket, wait
from .phases import measured_item, written_item

COLUMNS = tl.constexpr(9)
"""Of a row of the tensor table: the addresses of g, m, v, p, k and t, the number of elements, first slot, items."""

NUMBERS = tl.constexpr(8)
"""What both kernels take as scalars: 1-beta1 (or c1), log(beta1), 1-beta2 (or c2), log(beta2), lr, eps, floor, decay."""


@triton.jit(
    do_not_specialize=["item_count", "tensor_count", "first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay"],
    do_not_specialize_on_alignment=["applied_ptr"],
)
def update_group(
    items, tensors, partials, squares, counters, item_count, tensor_count, applied_ptr,
    numbers, first1, log1, first2, log2, lr, eps, floor, decay,
    PHASES: tl.constexpr, CLIP: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr, COMPENSATION: tl.constexpr,
    EACH: tl.constexpr, STEP_ON_DEVICE: tl.constexpr, ALIGNMENT: tl.constexpr, HINTS: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    r"""`core.update.update`, with first=True, of every tensor of a table.

        m += c1*(g-m)      v += c2*(g*g-v)      eta = lr / max(1, sqrt(mean(g*g / max(v, eps^2))))       (CLIP)
        p <- p - eta*(m/(sqrt(v)+eps) + decay*p)                 (without CLIP eta = lr; with L2: g += decay*p instead)

    Args:
        items: int32, three a row: phase (0 measure, 1 write), tensor, number of the item in its tensor; in ticket order.
        tensors: int64, `COLUMNS` a row.
        partials: WIDE, a slot for each item of the table's tensors.
        squares: WIDE, a mean square for each tensor; written by measure, read by write.
        counters: int32, zero: ticket, programs that have left, then for each tensor items arrived and whether its mean
            square is ready. They are zero again at the end.
        applied_ptr: float32, or None: one number for all tensors, or with EACH one for each. Measure puts 0 there if a
            gradient is not finite; write does nothing then.
        numbers: None, and the scalars are arguments; or WIDE, `NUMBERS` of them.
        PHASES: "measure", "write", or "both" with tickets.
        ZERO1, ZERO2: whether beta1, and beta2, are known to be 0: `core.moments.reset_where_beta_is_zero`. No other value of
            them, or of the scalars, is compiled in.
        ALIGNMENT: bytes that every address is a multiple of.
    """
    if numbers is not None:
        first1, log1 = tl.load(numbers), tl.load(numbers + 1)
        first2, log2 = tl.load(numbers + 2), tl.load(numbers + 3)
        lr, eps = tl.load(numbers + 4), tl.load(numbers + 5)
        floor, decay = tl.load(numbers + 6), tl.load(numbers + 7)
    KEEP: tl.constexpr = "evict_last" if HINTS and PHASES == "both" else ""
    PASS: tl.constexpr = "evict_first" if HINTS else ""
    if PHASES == "both":  # noqa: SIM108  (Triton compiles both sides of a conditional expression)
        ticket = take_ticket(counters)
    else:
        ticket = tl.program_id(0)
    while ticket < item_count:
        entry = items + ticket.to(tl.int64) * 3
        phase = tl.load(entry)
        tensor = tl.load(entry + 1)
        item = tl.load(entry + 2)
        row = tensors + tensor.to(tl.int64) * COLUMNS
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
        complement2 = bias_correction(first2, log2, step_ptr, STEP_ON_DEVICE, WIDE)
        if PHASES != "write":
            if phase == 0:
                slot = tl.load(row + 7)
                count = tl.load(row + 8).to(tl.int32)
                partial = measured_item(
                    g_ptr, v_ptr, p_ptr, k_ptr, base, n, flag_ptr, complement2, floor, decay,
                    True, ZERO2, L2, MAXIMIZE, COMPENSATION, WIDE, KEEP, TILES, BLOCK, TAIL,
                )  # fmt: skip
                if CLIP:
                    last, square = arrive(partials + slot, item, count, partial, arrived, n, WIDE)
                    if last:
                        tl.store(squares + tensor, square)
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
                    complement1 = bias_correction(first1, log1, step_ptr, STEP_ON_DEVICE, WIDE)
                    _ = written_item(
                        g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, base, n, complement1, complement2, eta, eps, floor, decay,
                        "update", True, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, WIDE, PASS, TILES, BLOCK, TAIL,
                    )  # fmt: skip
        if PHASES == "both":
            ticket = take_ticket(counters)
        else:
            ticket += tl.num_programs(0)
    if PHASES == "both":
        if left_last(counters + 1):
            for start in range(0, tensor_count, SUMMED_AT_ONCE):
                tensor = start + tl.arange(0, SUMMED_AT_ONCE)
                tl.store(counters + 3 + tensor * 2, tl.zeros_like(tensor), mask=tensor < tensor_count)
            tl.store(counters, 0)
            tl.store(counters + 1, 0)


@triton.jit(
    do_not_specialize=[*"gmvpk", "n", "item_count", "first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay"],
    do_not_specialize_on_alignment=["step_ptr", "square_before", "applied_ptr"],
)
def update_tensor(
    g: tl.int64, m: tl.int64, v: tl.int64, p: tl.int64, k: tl.int64, n: tl.int64, item_count: tl.int32, step_ptr,
    partials, counters, square_before, square_after, applied_ptr,
    numbers, first1, log1, first2, log2, lr, eps, floor, decay,
    ACTION: tl.constexpr, FIRST: tl.constexpr, CLIP: tl.constexpr, ZERO1: tl.constexpr, ZERO2: tl.constexpr,
    L2: tl.constexpr, MAXIMIZE: tl.constexpr,
    COMPENSATION: tl.constexpr, ALIGNMENT: tl.constexpr, HINTS: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    r"""`core.update.update`, `accumulate` or `apply` of one tensor, by ACTION; the mathematics is that of `update_group`.

        FIRST      m += c1*(g-m)    v += c2*(g*g-v)
        otherwise  m += c1*g        v += c2*g*g                    (a later micro-batch of the same update)
        CLIP       mean_square = square_before + mean(g*g / max(v, eps^2))        eta = lr / max(1, sqrt(mean_square))

    "update" measures and writes with tickets where it clips or checks; "accumulate" and "apply" need one pass each.

    Args:
        g, m, v, p, k: the addresses. Nothing is read from g by "apply".
        step_ptr: float32 0-d, t of the last update; None where c1 and c2 are given.
        square_before: 0-d, or None for 0: the mean squares of earlier micro-batches; for "apply", of all.
        square_after: WIDE 0-d, written by "update" and "accumulate" where the rule clips.
        partials, counters: as in `update_group`, for one tensor.
        applied_ptr, numbers, the scalars, ZERO1, ZERO2, ALIGNMENT: as in `update_group`. A tile is spread over threads as
            there, by ALIGNMENT and nothing else: the order of a sum, and so every bit, is the same.
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
    KEEP: tl.constexpr = "evict_last" if HINTS else ""
    PASS: tl.constexpr = "evict_first" if HINTS else ""
    complement1 = first1
    complement2 = first2
    if step_ptr is not None:
        complement1 = bias_correction(first1, log1, step_ptr, True, WIDE)
        complement2 = bias_correction(first2, log2, step_ptr, True, WIDE)
    before = 0.0
    if square_before is not None:
        before = tl.load(square_before).to(WIDE)
    ticket_count = item_count
    if TWO_PHASES:
        ticket_count = item_count * 2
        ticket = take_ticket(counters)
        tl.debug_barrier()  # else LLVM merges this ticket with the next, and on AMD the counting thread leaves the others
    else:
        ticket = tl.program_id(0)
    while ticket < ticket_count:
        measures = False
        if TWO_PHASES:
            measures = ticket < item_count
        if measures:
            partial = measured_item(
                g_ptr, v_ptr, p_ptr, k_ptr, ticket.to(tl.int64) * (TILES * BLOCK), n, applied_ptr,
                complement2, floor, decay, FIRST, ZERO2, L2, MAXIMIZE, COMPENSATION, WIDE, KEEP, TILES, BLOCK, TAIL,
            )  # fmt: skip
            last, square = arrive(partials, ticket, item_count, partial, counters + 2, n, WIDE)
            if last:
                tl.store(square_after, before + square)
                announce(counters + 3)
        else:
            item = ticket
            usable = True
            eta = lr
            if TWO_PHASES:
                item = item_count * 2 - 1 - ticket  # backward: what was measured last is still in the cache
                wait(counters + 3)
                if applied_ptr is not None:
                    usable = tl.load(applied_ptr, cache_modifier=".cg") != 0.0
                if CLIP:
                    eta = clipped_learning_rate(lr, tl.load(square_after, cache_modifier=".cg"))
            elif CLIP and ACTION == "apply":
                eta = clipped_learning_rate(lr, before)
            if usable:
                partial = written_item(
                    g_ptr, m_ptr, v_ptr, p_ptr, k_ptr, item.to(tl.int64) * (TILES * BLOCK), n,
                    complement1, complement2, eta, eps, floor, decay,
                    ACTION, FIRST, ZERO1, ZERO2, L2, MAXIMIZE, COMPENSATION, WIDE, PASS, TILES, BLOCK, TAIL,
                )  # fmt: skip
                if CLIP and ACTION == "accumulate":
                    last, square = arrive(partials, item, item_count, partial, counters + 2, n, WIDE)
                    if last:
                        tl.store(square_after, before + square)
        if TWO_PHASES:
            ticket = take_ticket(counters)
        else:
            ticket += tl.num_programs(0)
    if TWO_PHASES:
        if left_last(counters + 1):
            tl.store(counters, 0)
            tl.store(counters + 1, 0)
            tl.store(counters + 3, 0)
