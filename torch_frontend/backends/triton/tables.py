"""The tables of a launch for many tensors, cached on the device and uploaded only when they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import devices, work
from .memory import Uploaded, Uploads

PHASES = {"both": (work.MEASURE, work.WRITE), "measure": (work.MEASURE,), "write": (work.WRITE,)}

ITEM_BYTES = 2**27
"""Largest total size of cached tables of items; a model of 7 billion parameters needs a few such tables of 20 MB. The
least recently used are dropped first."""

TABLES = 1024
"""Largest number of cached tables of tensors; a parameter that moves gets a new one. The least recently used are dropped
first."""

Key = tuple[object, ...]


class Tables(NamedTuple):
    """The tables of a launch of `kernels.update_group`.

    items, tensors: as described there.
    ticket_count, slot_count: the number of rows of `items`, and of partial sums.
    """

    items: Tensor
    tensors: Tensor
    ticket_count: int
    slot_count: int


class Items(NamedTuple):
    """What follows from the tensors' sizes: the table of items, and three columns of the table of tensors.

    slot_count: number of partial sums.
    sizes: number of elements, first slot and number of items of each tensor, (3, tensors).
    """

    table: Uploaded
    slot_count: int
    sizes: np.ndarray


class GroupTables:
    """Makes and caches tables. Those of items depend on sizes only; those of tensors change when an address does."""

    def __init__(self) -> None:
        self._upload = Uploads()
        self._items: dict[Key, Items] = {}
        self._tensors: dict[Key, tuple[list[list[int]], np.ndarray, Uploaded]] = {}

    def __call__(
        self,
        addresses: list[list[int]],
        numels: list[int],
        item_elements: int,
        wave_elements: int,
        phases: str,
        device: torch.device,
        *,
        capturable: bool,
        coding: Sequence[list[int]] = (),
    ) -> Tables:
        """Return the tables of a launch.

        Args:
            addresses: six columns: those of the tensors in the order of `Operands`, and that of t, or 0.
            numels: number of elements of each tensor.
            item_elements: elements of an item.
            wave_elements: elements that are measured before they are written.
            phases: as `kernels.update_group` takes it.
            device: of all tensors.
            capturable: a later launch may be captured in a graph.
            coding: further columns, after those of sizes.

        Raises:
            RefusedError: a graph is being captured, and no step of these parameters was taken before.
        """
        items = self._items_table(tuple(numels), item_elements, wave_elements, phases, device)
        # The first parameter's address identifies the table, as no parameter is in two launches of a step.
        key = addresses[3][0], item_elements, phases, device
        tensors = self._tensors_table(key, [*addresses, *coding], items.sizes, capturable)
        table = items.table.here()
        return Tables(table, tensors, table.shape[0], items.slot_count)

    def _items_table(
        self, numels: tuple[int, ...], item_elements: int, wave_elements: int, phases: str, device: torch.device
    ) -> Items:
        key = (numels, item_elements, wave_elements, phases, device)
        known = self._items.pop(key, None)
        if known is None:
            counts = work.item_counts(numels, item_elements)
            table = self._upload(key, work.tickets(numels, item_elements, wave_elements, PHASES[phases]), device)
            known = Items(table, sum(counts), np.array([numels, work.first_slots(counts), counts], np.int64))
        elif devices.capturing(device):
            self._upload.keep(known.table.tensor)
        self._items[key] = known  # at the end, as the most recently used
        while len(self._items) > 1 and sum(items.table.tensor.nbytes for items in self._items.values()) > ITEM_BYTES:
            del self._items[next(iter(self._items))]
        return known

    def _tensors_table(
        self, key: tuple[int, int, str, torch.device], addresses: list[list[int]], sizes: np.ndarray, capturable: bool
    ) -> Tensor:
        device = key[3]
        known = self._tensors.pop(key, None)
        captured = devices.capturing(device)
        if known is not None and known[0] == addresses and known[1] is sizes:
            table = known[2]
            self._tensors[key] = known  # at the end, as the most recently used
            if captured:
                self._upload.keep(table.tensor)
        else:
            columns = np.array(addresses, np.int64)
            rows = np.concatenate([columns[:6], sizes, columns[6:]]).T
            table = self._upload(key, np.ascontiguousarray(rows), device)
            if not captured:  # a graph's upload has contents only while the graph runs
                self._tensors[key] = (addresses, sizes, table)
            if len(self._tensors) > TABLES:
                oldest = next(iter(self._tensors))
                del self._tensors[oldest]
                self._upload.drop(oldest)
        if capturable and not captured:
            self._upload.provide(key, table.tensor.nbytes, device)
        return table.here()
