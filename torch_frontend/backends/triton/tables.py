"""The tables of a launch for many tensors, uploaded only when they have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import work
from .memory import Operands, Uploads, capturing, check_device

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
        self._items: dict[Key, Tensor] = {}
        self._tensors: dict[Key, tuple[list[list[int]], Tensor]] = {}

    def __call__(
        self,
        given: Sequence[Operands],
        addresses: Sequence[list[int]],
        steps: Sequence[Tensor] | None,
        item_elements: int,
        wave_elements: int,
        phases: str,
        device: torch.device,
    ) -> Tables:
        """The tables of a launch.

        Args:
            given: of each tensor.
            addresses: of each of them, in the order of `Operands`.
            steps: t of each tensor, on the device; None where the host counts, and no launch is ever captured.
            item_elements: elements of an item.
            wave_elements: elements that are measured before they are written.
            phases: as `kernels.update_group` takes it.
            device: of all tensors.

        Raises:
            UnsupportedTensor: a tensor of the state is on another device than its parameter.
            Refused: a graph is being captured, and no step of these parameters was taken before.
        """
        numels = tuple(operands.parameter.numel() for operands in given)
        counts = work.item_counts(numels, item_elements)
        rows = []
        for position, slot in enumerate(work.first_slots(counts)):
            step = 0 if steps is None else steps[position].data_ptr()
            rows.append([*addresses[position], step, numels[position], slot, counts[position]])
        tensors = self._tensors_table(given, rows, steps is not None, phases, device)
        items = self._items_table(numels, counts, item_elements, wave_elements, phases, device)
        if device.type == "cuda" and not capturing(device):  # another stream than the one they were uploaded on may read them
            for table in (items, tensors):
                table.record_stream(torch.cuda.current_stream(device))
        return Tables(items, tensors, items.shape[0], sum(counts))

    def _items_table(
        self,
        numels: tuple[int, ...],
        counts: list[int],
        item_elements: int,
        wave_elements: int,
        phases: str,
        device: torch.device,
    ) -> Tensor:
        key = (numels, item_elements, wave_elements, phases, device)
        known = self._items.pop(key, None)
        if known is None:
            groups = work.waves(numels, wave_elements)
            known = self._upload(key, work.items(counts, groups, PHASES[phases]), device)
        elif capturing(device):
            self._upload.keep(known)
        self._items[key] = known  # the last one now
        while len(self._items) > 1 and sum(table.nbytes for table in self._items.values()) > ITEM_BYTES:
            del self._items[next(iter(self._items))]
        return known

    def _tensors_table(
        self, given: Sequence[Operands], rows: list[list[int]], capturable: bool, phases: str, device: torch.device
    ) -> Tensor:
        key = (rows[0][3], phases, device)  # no parameter is in two launches of a step
        known = self._tensors.get(key)
        captured = capturing(device)
        if known is not None and known[0] == rows:
            table = self._upload.keep(known[1]) if captured else known[1]
        else:
            for operands in given:
                check_device(operands)
            table = self._upload(key, np.array(rows, np.int64), device)
            if not captured:  # what a graph uploads is there only while the graph runs
                self._tensors[key] = (rows, table)
        if capturable and not captured:
            self._upload.provide(key, len(rows) * len(rows[0]) * 8, device)
        return table
