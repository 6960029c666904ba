"""The work of a launch: its items, its waves and the order of its tickets. Pure Python and numpy, without a device.

Under update clipping every element of g and v is read twice: to measure and to write. A *wave* is a run of tensors whose
measured bytes fit into a share of the second-level cache, so that the second read comes from the cache; a tensor larger than
that is a wave of its own. The order of tickets is

    measure(w0)  measure(w1)  write(w0)  measure(w2)  write(w1)  ...  write(last)

so that measuring the next wave keeps the device busy while the last items of a wave are being measured. A wave is written in
reverse, starting with what was read last. If the next wave is a large tensor, only the size of an ordinary wave is measured
ahead, and the rest after the write: more would evict from the cache what is to be written next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEASURE, WRITE = 0, 1


def item_counts(numels: Sequence[int], item_elements: int) -> list[int]:
    """Return the number of items of each tensor; the last item may be short."""
    return [-(-numel // item_elements) for numel in numels]


def first_slots(counts: Sequence[int]) -> list[int]:
    """Return the number of each tensor's first slot for partial sums."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts[:-1]


def waves(numels: Sequence[int], wave_elements: int) -> list[range]:
    """Return runs of tensors of at most `wave_elements` in total; a larger tensor is a run of its own."""
    found, start, size = [], 0, 0
    for tensor, numel in enumerate(numels):
        if tensor > start and size + numel > wave_elements:
            found.append(range(start, tensor))
            start, size = tensor, 0
        size += numel
    if start < len(numels):
        found.append(range(start, len(numels)))
    return found


def tickets(
    numels: Sequence[int], item_elements: int, wave_elements: int, phases: Sequence[int] = (MEASURE, WRITE)
) -> np.ndarray:
    """Return the table of `items` for tensors of these sizes, with one wave's size measured ahead of each write."""
    counts = item_counts(numels, item_elements)
    (ahead,) = item_counts([wave_elements], item_elements)
    return items(counts, waves(numels, wave_elements), ahead, phases)


def items(counts: Sequence[int], groups: Sequence[range], ahead: int, phases: Sequence[int] = (MEASURE, WRITE)) -> np.ndarray:
    """Return the table of items in ticket order.

    Args:
        counts: number of items of each tensor.
        groups: the waves.
        ahead: largest number of items of the next wave that are measured before a wave is written.
        phases: the phases of the launch.

    Returns:
        int32, (tickets, 3): phase, tensor, number of the item in its tensor. Every measure item of a tensor comes before its
        first write item.
    """
    order, begun = [], 0  # the number of items of this wave that are measured already
    for wave, tensors in enumerate(groups):
        if MEASURE in phases:
            following = groups[wave + 1] if wave + 1 < len(groups) else range(0)
            order += [_rows(MEASURE, tensors, counts)[begun:], _rows(MEASURE, following, counts)[:ahead]]
            begun = ahead
        if WRITE in phases:
            order.append(_rows(WRITE, tensors, counts)[::-1])
    return np.concatenate(order) if order else np.zeros((0, 3), np.int32)


def _rows(phase: int, tensors: range, counts: Sequence[int]) -> np.ndarray:
    length = np.asarray([counts[tensor] for tensor in tensors], np.int64)
    rows = np.empty((int(length.sum()), 3), np.int32)
    rows[:, 0] = phase
    rows[:, 1] = np.repeat(np.asarray(tensors, np.int32), length)
    rows[:, 2] = np.arange(len(rows)) - np.repeat(np.cumsum(length) - length, length)
    return rows
