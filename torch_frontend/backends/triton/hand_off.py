"""How programs hand work and sums to each other: tickets, arrivals and announcements, all of them integers counted up.

What is handed over is written first, and then a counter is counted up with release; whoever needs it reads that counter with
acquire, and then what was written, past the first-level cache. The counters are those of `kernels.update_group`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# (Triton gives Python's words its own types.)

import triton
import triton.language as tl

SUMMED_AT_ONCE = tl.constexpr(1024)
"""Partial sums, or counters that are reset, at a time."""


@triton.jit
def arrive(partials, item, items, partial, arrived, n, WIDE: tl.constexpr):
    """Leave a partial sum in its slot. Whether this was the tensor's last, and then the mean of all of them."""
    tl.store(partials + item, partial)
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == items - 1
    total = tl.zeros((SUMMED_AT_ONCE,), WIDE)
    if last:
        tl.debug_barrier()
        for start in range(0, items, SUMMED_AT_ONCE):
            slot = start + tl.arange(0, SUMMED_AT_ONCE)
            total += tl.load(partials + slot, mask=slot < items, other=0.0, cache_modifier=".cg")
        tl.store(arrived, 0)
    return last, tl.sum(total, 0) / n.to(WIDE)


@triton.jit
def announce(ready):
    """What this program has stored, and what it has seen, is there for whoever waits."""
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")


@triton.jit
def wait(ready):
    """Until it is announced."""
    while tl.atomic_add(ready, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def take_ticket(ticket):
    """The next number that nobody has."""
    return tl.atomic_add(ticket, 1, sem="relaxed")


@triton.jit
def left_last(left):
    """Whether this program is the last to leave; every other one is past its last look at the counters."""
    tl.debug_barrier()
    return tl.atomic_add(left, 1, sem="acq_rel") == tl.num_programs(0) - 1
