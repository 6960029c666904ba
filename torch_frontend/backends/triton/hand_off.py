"""Synchronisation between the programs of a launch: tickets, arrivals and announcements are integer counters.

A program stores its result, and then increments a counter with release semantics; another program reads the counter with
acquire semantics, and then the result, bypassing the first-level cache. The counters are those of `kernels.update_group`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

SUMMED_AT_ONCE = tl.constexpr(1024)
"""Number of partial sums that are added at once, and of counters that are reset at once."""


@triton.jit
def arrive(partials, item, items, partial, square, arrived, SQUARES: tl.constexpr, COMPUTE: tl.constexpr):
    """Store partial sums in their slots; return whether they were the tensor's last, and if so the total of each.

    SQUARES: there is a second partial sum, `square`, whose slots follow those of the first.
    """
    if SQUARES:
        tl.store(partials + items + item, square)
    tl.store(partials + item, partial)
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == items - 1
    if last:
        tl.debug_barrier()
        totals = tl.zeros((SUMMED_AT_ONCE,), COMPUTE)
        squares = tl.zeros((SUMMED_AT_ONCE,), COMPUTE)
        for start in range(0, items, SUMMED_AT_ONCE):
            slot = start + tl.arange(0, SUMMED_AT_ONCE)
            totals += tl.load(partials + slot, mask=slot < items, other=0.0, cache_modifier=".cg")
            if SQUARES:
                squares += tl.load(partials + items + slot, mask=slot < items, other=0.0, cache_modifier=".cg")
        partial = tl.sum(totals, 0)
        if SQUARES:
            square = tl.sum(squares, 0)
        tl.store(arrived, 0)
    return last, partial, square


@triton.jit
def announce(ready):
    """Make the stores of this program, and those it has acquired, visible to the programs that wait."""
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")


@triton.jit
def wait(ready):
    """Wait until the result is announced."""
    while tl.atomic_add(ready, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def take_ticket(ticket):
    """Return the next ticket."""
    return tl.atomic_add(ticket, 1, sem="relaxed")


@triton.jit
def is_last_to_leave(left):
    """Whether this program is the last to leave: all others have read the counters for the last time."""
    tl.debug_barrier()
    return tl.atomic_add(left, 1, sem="acq_rel") == tl.num_programs(0) - 1
