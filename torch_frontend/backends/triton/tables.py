"""The tables of a launch for many tensors, uploaded only when they have changed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import work
from .memory import Operands, Uploads, capturing

ALIGNMENT = 16
"""Bytes of the widest access."""

PHASES = {"both": (work.MEASURE, work.WRITE), "measure": (work.MEASURE,), "write": (work.WRITE,)}


class Tables(NamedTuple):
    """What `kernels.update_group` walks through.

    items, tensors: as described there.
    ticket_count, slot_count: rows of `items`, and partial sums.
    alignment: bytes that every address is a multiple of.
    """

    items: Tensor
    tensors: Tensor
    ticket_count: int
    slot_count: int
    alignment: int


class GroupTables:
    """Tables by what they were made of. Items follow from sizes and are made once; addresses of gradients may change."""

    def __init__(self, upload: Uploads) -> None:
        self._upload = upload
        self._items: dict[tuple[object, ...], Tensor] = {}
        self._tensors: dict[tuple[object, ...], tuple[list[list[int]], Tensor]] = {}

    def __call__(
        self,
        given: Sequence[Operands],
        steps: Sequence[Tensor] | None,
        item_elements: int,
        wave_elements: int,
        phases: str,
        device: torch.device,
    ) -> Tables:
        """The tables of a launch.

        Args:
            given: of each tensor.
            steps: t of each tensor, on the device; None where the host counts.
            item_elements: elements of an item.
            wave_elements: elements that are measured before they are written.
            phases: as `kernels.update_group` takes it.
            device: of all tensors.
        """
        numels = tuple(operands.parameter.numel() for operands in given)
        counts = work.item_counts(numels, item_elements)
        shape = (numels, item_elements, wave_elements, phases, device)
        items = self._items.get(shape)
        if items is None:
            groups = work.waves(numels, wave_elements)
            items = self._upload(work.items(counts, groups, PHASES[phases]), device)
            if not capturing(device):
                self._items[shape] = items
        rows = []
        for position, (operands, slot) in enumerate(zip(given, work.first_slots(counts), strict=True)):
            addresses = [tensor.data_ptr() for tensor in operands if tensor is not None]
            step = 0 if steps is None else steps[position].data_ptr()
            rows.append([*addresses, step, numels[position], slot, counts[position]])
        tensors = self._table(shape, rows, device)
        together = functools.reduce(operator.or_, (address for row in rows for address in row[:5]), 0)
        aligned = together % ALIGNMENT == 0
        smallest = min(tensor.element_size() for operands in given[:1] for tensor in operands if tensor is not None)
        return Tables(items, tensors, items.shape[0], sum(counts), ALIGNMENT if aligned else smallest)

    def _table(self, shape: tuple[object, ...], rows: list[list[int]], device: torch.device) -> Tensor:
        known = self._tensors.get(shape)
        captured = capturing(device)
        if known is not None and known[0] == rows:
            return self._upload.keep(known[1]) if captured else known[1]
        table = self._upload(np.array(rows, np.int64), device)
        if not captured:  # what a graph uploads is there only while the graph runs
            self._tensors[shape] = (rows, table)
        return table
