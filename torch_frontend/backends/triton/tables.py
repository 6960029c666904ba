"""The tables of a launch for many tensors, uploaded only when they have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import work
from .memory import Uploaded, Uploads, capturing

PHASES = {"both": (work.MEASURE, work.WRITE), "measure": (work.MEASURE,), "write": (work.WRITE,)}

ITEM_BYTES = 2**27
"""What tables of items may take in all: some of a model of 7 billion parameters. The least used go first."""

Key = tuple[object, ...]


class Tables(NamedTuple):
    """What `kernels.update_group` walks through.

    items, tensors: as described there.
    ticket_count, slot_count: rows of `items`, and partial sums.
    """

    items: Tensor
    tensors: Tensor
    ticket_count: int
    slot_count: int


class GroupTables:
    """Tables by what they were made of. Items follow from sizes and are made once; addresses of gradients may change."""

    def __init__(self) -> None:
        self._upload = Uploads()
        self._items: dict[Key, tuple[Uploaded, int]] = {}
        self._tensors: dict[Key, tuple[list[list[int]], tuple[int, ...], Uploaded]] = {}

    def __call__(
        self,
        addresses: list[list[int]],
        numels: tuple[int, ...],
        item_elements: int,
        wave_elements: int,
        phases: str,
        device: torch.device,
        *,
        capturable: bool,
        check: Callable[[], None],
    ) -> Tables:
        """The tables of a launch.

        Args:
            addresses: of each tensor, in the order of `Operands`, and of its t, or 0.
            numels: elements of each tensor.
            item_elements: elements of an item.
            wave_elements: elements that are measured before they are written.
            phases: as `kernels.update_group` takes it.
            device: of all tensors.
            capturable: a later launch may be captured in a graph.
            check: called if the addresses are new; raises if a kernel must not get them.

        Raises:
            Refused: a graph is being captured, and no step of these parameters was taken before.
        """
        tensors = self._tensors_table(addresses, numels, item_elements, phases, device, capturable, check)
        items, slot_count = self._items_table(numels, item_elements, wave_elements, phases, device)
        return Tables(items, tensors, items.shape[0], slot_count)

    def _items_table(
        self, numels: tuple[int, ...], item_elements: int, wave_elements: int, phases: str, device: torch.device
    ) -> tuple[Tensor, int]:
        key = (numels, item_elements, wave_elements, phases, device)
        known = self._items.pop(key, None)
        if known is None:
            rows = work.tickets(numels, item_elements, wave_elements, PHASES[phases])
            known = (self._upload(key, rows, device), sum(work.item_counts(numels, item_elements)))
        elif capturing(device):
            self._upload.keep(known[0].tensor)
        self._items[key] = known  # the last one now
        while len(self._items) > 1 and sum(table.tensor.nbytes for table, _ in self._items.values()) > ITEM_BYTES:
            del self._items[next(iter(self._items))]
        return known[0].here(), known[1]

    def _tensors_table(
        self,
        addresses: list[list[int]],
        numels: tuple[int, ...],
        item_elements: int,
        phases: str,
        device: torch.device,
        capturable: bool,
        check: Callable[[], None],
    ) -> Tensor:
        key = (addresses[0][3], item_elements, phases, device)  # no parameter is in two launches of a step
        known = self._tensors.get(key)
        captured = capturing(device)
        if known is not None and known[0] == addresses and known[1] == numels:
            table = known[2]
            if captured:
                self._upload.keep(table.tensor)
        else:
            check()
            counts = work.item_counts(numels, item_elements)
            rows = [[*row, *of] for row, *of in zip(addresses, numels, work.first_slots(counts), counts, strict=True)]
            table = self._upload(key, np.array(rows, np.int64), device)
            if not captured:  # what a graph uploads is there only while the graph runs
                self._tensors[key] = (addresses, numels, table)
        if capturable and not captured:
            self._upload.provide(key, table.tensor.nbytes, device)
        return table.here()
