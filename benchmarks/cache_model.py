"""What a step reads and writes in device memory, *computed* by a simulated second-level cache; nothing is measured.

    python -m benchmarks.cache_model [--model 1B] [--cache-mb 50] [--output FILE]        (some ten minutes)

The items are those of a launch (`work.tickets`, the table of configurations), their tiles in the order in which programs that
progress alike ask for them: as many programs as a launch has, each a tile in turn, a new item when the last one is done. The
cache holds tiles, the least recently used goes first (a true cache works on lines of 128 bytes and by sets); its capacity is
that of the device, and half of it, as the two halves of an H100's or H200's cache may both hold a line. With hints, what
nobody reads again ("evict_first") is the first to go. Reads that miss and every write count: the ratio is to the floor, g
read once, and m, v, p and k read and written once.
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.setting import SHAPES, STORAGES, Storage
from benchmarks.record import write_result
from penstock.torch_frontend.backends.triton import work
from penstock.torch_frontend.backends.triton.configuration import TABLE, Configuration, Device, wave_elements

RESULTS = Path(__file__).parent / "results"
MULTIPROCESSORS = 132
MODELS = {"124M": SHAPES["124M"], "1B": [2048 * 2048] * 4 + [2048 * 8192] * 3 + [128256 * 128] + [2048] * 2}
"""A sixteenth of the large one, whose layers are alike."""
SHARES = (1 / 8, 1 / 2, 64.0)
"""Of the cache, for a wave; 1/4 is the configuration's, 64 is no wave at all."""


class Cache:
    """Arrays of tiles, the least recently used out first; those marked as done with go before all others."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._passing: OrderedDict[int, int] = OrderedDict()

    def touch(self, name: int, size: int, *, passing: bool) -> bool:
        """Whether it is there; afterwards it is."""
        there = False
        for part in (self._kept, self._passing):
            if name in part:
                there = True
                self.used -= part.pop(name)
        (self._passing if passing else self._kept)[name] = size
        self.used += size
        while self.used > self.capacity:
            victims = self._passing if len(self._passing) > passing or not self._kept else self._kept
            self.used -= victims.popitem(last=False)[1]
        return there


def moved_bytes(
    numels: list[int], storage: Storage, chosen: Configuration, device: Device, capacity: int, *, stores_unmark: bool = False
) -> int:
    """Bytes that a StableAdamW step moves between cache and memory.

    With `stores_unmark`, a store takes from its line the mark that the load before it gave.
    """
    element = storage.dtype.itemsize
    counts = work.item_counts(numels, chosen.item)
    table = work.tickets(numels, chosen.item, wave_elements(chosen, device, 2 * element)).tolist()
    starts = work.first_slots(counts)
    written = 3 * element + (2 if storage.compensation == "split" else 0)
    programs = min(device.multiprocessors * chosen.programs, len(table))
    cache, moved = Cache(capacity), 0
    tile_bytes = chosen.block * element
    upcoming = iter(table)
    ready = [(0.0, program, 0) for program in range(programs)]  # time, program, tiles left of its item
    current: dict[int, list[int]] = {}
    heapq.heapify(ready)
    while ready:
        at, program, left = heapq.heappop(ready)
        if left == 0:
            row = next(upcoming, None)
            if row is None:
                continue
            current[program] = row
            first = row[2] * chosen.item
            left = -(-min(numels[row[1]] - first, chosen.item) // chosen.block)
        phase, tensor, item = current[program]
        first = item * chosen.item
        tiles = -(-min(numels[tensor] - first, chosen.item) // chosen.block)
        tile = tiles - left
        share = min(numels[tensor] - first - tile * chosen.block, chosen.block) / chosen.block
        name = 2 * ((starts[tensor] + item) * chosen.tiles + tile)
        size = int(tile_bytes * share)
        for array in (0, 1):  # g and v, which both phases read
            passing = chosen.hints and phase == work.WRITE and not (stores_unmark and array == 1)
            if not cache.touch(name + array, size, passing=passing):
                moved += size
        cost = 2.0 * element
        if phase == work.WRITE:
            others = int(chosen.block * share) * (written - element)
            moved += 2 * others + size  # m, p and k read and written, v written
            cache.touch(-1 - name, others, passing=chosen.hints and not stores_unmark)  # m, p and k are in the cache as well
            cost += 2 * (written - element) + element
        heapq.heappush(ready, (at + cost * share, program, left - 1))
    return moved


def main() -> None:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="124M")
    parser.add_argument("--cache-mb", type=float, default=60.0, help="of the device; an H200 reports 60 MB")
    parser.add_argument("--output", type=Path, help="by default benchmarks/results/cache_model_MODEL_computed.json")
    arguments = parser.parse_args()
    cache_bytes = int(arguments.cache_mb * 1e6)
    device = Device(MULTIPROCESSORS, cache_bytes)
    chosen = TABLE["cuda", None]
    changes: list[tuple[str, dict[str, Any], bool]] = [("as configured", {}, False), ("stores unmark their lines", {}, True)]
    changes += [(f"wave of {share:g} caches", {"wave_bytes": int(cache_bytes * share)}, False) for share in SHARES]
    changes += [("no hints", {"hints": False}, False)]
    rows: list[dict[str, Any]] = []
    model, numels = arguments.model, MODELS[arguments.model]
    for storage in STORAGES:
        floor = storage.floor_bytes(sum(numels))
        for name, change, unmark in changes:
            configured = Configuration(**{**vars(chosen), **change})
            row: dict[str, Any] = {"model": model, "storage": storage.name, "change": name}
            for label, capacity in (("whole", cache_bytes), ("half", cache_bytes // 2)):
                moved = moved_bytes(numels, storage, configured, device, capacity, stores_unmark=unmark)
                row[f"ratio_{label}_cache"] = moved / floor
            rows.append(row)
        found = [row for row in rows if row["storage"] == storage.name]
        table = Table("change", "whole cache", "half of it", title=f"computed bytes / floor: {model}, {storage.name}")
        for row in found:
            table.add_row(row["change"], f"{row['ratio_whole_cache']:.3f}", f"{row['ratio_half_cache']:.3f}")
        Console().print(table)
    write_result(
        arguments.output or RESULTS / f"cache_model_{model}_computed.json",
        {
            "computed": "by a simulated cache; no device was measured",
            "settings": {"cache_bytes": cache_bytes, "multiprocessors": MULTIPROCESSORS, "configuration": vars(chosen)},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
