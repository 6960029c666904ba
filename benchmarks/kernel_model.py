"""Estimate of the kernels' time over the bandwidth floor, from bytes in flight and latencies: computed, not measured.

    python -m benchmarks.kernel_model [--output FILE]

A multiprocessor is a closed queueing network: each of its programs fetches tiles (a delay of one latency, then a queue at the
memory, whose service time is bytes over the multiprocessor's share of the bandwidth), computes, and once an item pays for its
ticket and rows. Its throughput is that of exact mean value analysis (Reiser and Lavenberg, 1980): with n programs, R = D*(1+Q),
X = n/(Z+R), Q = X*R, where D is the service time and Z the delays. Few bytes in flight are few customers. The second read
of what was measured comes from the second-level cache as far as a least-recently-used cache still holds it, in the order of the
launch's own tickets. What the model leaves out: clocks, contention of atomics, pages of DRAM, and the cache's two halves.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.setting import SHAPES, STORAGES, Storage
from benchmarks.support import parser_of, print_tables, write_result
from penstock.core.codings.eight_bit import BLOCK
from penstock.torch_frontend.backends.triton import work
from penstock.torch_frontend.backends.triton.configuration import (
    TABLE,
    Configuration,
    Device,
    resident_programs,
    wave_elements,
    with_random_bits,
)

TITLE = "COMPUTED ratio to the floor, not measured"
AIMS = {"124M": 1.15, "1B": 1.21}
"""Largest ratio to the floor that bf16 and split are meant to have, by the model."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """An H200; each figure with its source. Times in microseconds, bytes per microsecond.

    bandwidth: bytes read and written by a copy on one H200 (torch, 8.6 GB in 2.0 ms).
    multiprocessors, cache: as torch reports them (132; 60 MB). Half of the cache counts: what one of its halves holds may be
        copied to the other one.
    cache_bandwidth: reads of an H100's second-level cache, chipsandcheese.com, "Nvidia's H100: Funny L2" (2023).
    memory, near: latencies of DRAM and of the second-level cache while the memory is saturated: a judgement, about three times
        those of an idle device. An item's chain of three then takes 1.8, which was estimated before this model.
    instruction: of one thread; a scheduler issues one for the 32 threads of a warp each cycle, at 1.755 GHz.
    schedulers: of a multiprocessor; a program of fewer warps leaves some of them to others.
    float64: exp, log and three quotients, about 900 dependent cycles, for one bias correction: a judgement.
    launch: until a second launch on a stream begins: a judgement, 3 to 5.
    """

    bandwidth: float = 4.3e6
    multiprocessors: int = 132
    cache: int = 60_000_000 // 2
    cache_bandwidth: float = 5.5e6
    memory: float = 0.8
    near: float = 0.6
    instruction: float = 1 / 32 / 1755
    schedulers: int = 4
    float64: float = 900 / 1755
    launch: float = 4.0


H200 = Chip()

INSTRUCTIONS = {False: {"measure": 60, "write": 60}, True: {"measure": 32, "write": 151}}
"""Of one element: a judgement; with codes and random bits (True), those of the loops that are compiled for sm_90."""


REGISTERS = {"bf16": 56, "fp32": 56, "split": 64, "compact": 144, "smallest": 137}
"""Registers of the launch of many tensors on sm_90, as Triton 3.7 compiles it; 72 at first."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to launch, with the sizes of its configuration.

    exposed: dependent round trips to the second-level cache before an item's first tile, which nothing hides.
    tickets: one launch with tickets; otherwise a pair of launches.
    corrections: bias corrections in float64 for each item.
    before: small launches before it, for all tensors.
    """

    name: str
    chosen: Configuration
    exposed: int = 3
    tickets: bool = True
    corrections: int = 0
    before: int = 0

    def programs(self, storage: Storage) -> int:
        """Return the number of programs on a multiprocessor."""
        return self.chosen.programs or resident_programs(REGISTERS[storage.name], self.chosen.warps)


def kernels() -> list[Kernel]:
    """Return the kernels to compare: as they were when the constants above were fixed, and as they are."""
    first = Configuration(block=1024, tiles=8, tail=128, unroll=1, warps=4, registers=72, programs=7, wave_bytes=15_000_000)
    now = TABLE["cuda", None]
    return [
        Kernel("first", first),
        Kernel("first, capturable", first, corrections=2),
        Kernel("first, pair of launches", first, tickets=False),
        Kernel("now", now),
        Kernel("now, capturable", now, before=1),
        Kernel("now, pair of launches", now, tickets=False),
    ]


def launched(kernel: Kernel, storage: Storage) -> Kernel:
    """Return a kernel with the sizes of its configuration for this storage."""
    if not storage.coded:
        return kernel
    return dataclasses.replace(kernel, chosen=with_random_bits(kernel.chosen, BLOCK))


def throughput(customers: int, service: float, delay: float) -> float:
    """Return the visits per microsecond of a closed network: one queue with this service time, and this delay."""
    found, waiting = 0.0, 0.0
    for count in range(1, customers + 1):
        residence = service * (1 + waiting)
        found = count / (delay + residence)
        waiting = found * residence
    return found


def hits(numels: Sequence[int], kernel: Kernel, wave_elements: int, storage: Storage, chip: Chip = H200) -> float:
    """Return the share of what was measured that writing finds in the cache."""
    size = kernel.chosen.item * storage.measured_bytes
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    found = total = 0
    for phase, tensor, item in work.tickets(numels, kernel.chosen.item, wave_elements).tolist():
        known = cached.pop((tensor, item), 0) is None
        if phase == work.WRITE:
            found += known
            total += 1
        else:
            cached[tensor, item] = None
            while len(cached) * size > chip.cache:
                cached.popitem(last=False)
    return found / total


def bytes_in_flight(kernel: Kernel, storage: Storage) -> dict[str, float]:
    """Return the bytes that a multiprocessor's programs have asked for at once, at most, by phase."""
    chosen = kernel.chosen
    tile = kernel.programs(storage) * chosen.block
    read = (storage.floor_bytes + storage.dtype.itemsize) / 2
    return {"measure": tile * storage.measured_bytes * chosen.unroll, "write": tile * read}


def microseconds(numels: Sequence[int], kernel: Kernel, storage: Storage, chip: Chip = H200) -> dict[str, float]:
    """Return the time of a step, and what it consists of."""
    chosen = kernel.chosen
    share = chip.bandwidth / chip.multiprocessors
    wave = wave_elements(chosen, Device(chip.multiprocessors, 2 * chip.cache), int(storage.measured_bytes))
    reused = hits(numels, kernel, wave, storage, chip) if kernel.tickets else 0.0
    tiles = sum(math.ceil(n / chosen.block) for n in numels)
    per_item = tiles / sum(math.ceil(n / chosen.item) for n in numels)
    overhead = kernel.exposed * chip.near + kernel.corrections * chip.float64
    spent, alone = {}, {}
    for phase, tiles_at_once, loaded, moved in (
        ("measure", chosen.unroll, storage.measured_bytes, storage.measured_bytes),
        ("write", 1, storage.floor_bytes, storage.floor_bytes - reused * storage.measured_bytes),
    ):
        compute = INSTRUCTIONS[storage.coded][phase] * chip.instruction * chosen.block / min(chosen.warps, chip.schedulers)
        delay = chip.memory + tiles_at_once * (compute + overhead / per_item)
        delay += tiles_at_once * chosen.block * (loaded - moved) / (chip.cache_bandwidth / chip.multiprocessors)
        service = tiles_at_once * chosen.block * moved / share
        visits = throughput(kernel.programs(storage), service, delay)
        spent[phase] = tiles / tiles_at_once / visits / chip.multiprocessors
        alone[phase] = overhead + per_item / tiles_at_once * (chip.memory + tiles_at_once * compute)
    # at the end of a launch programs run out of items one after the other: on average half an item's time is idle
    spent["ends"] = sum(alone.values()) / 2 if not kernel.tickets else alone["write"] / 2
    spent["launch"] = chip.launch * (kernel.before + (not kernel.tickets))
    return {"total": sum(spent.values()), **spent, "reused": reused}


def estimates() -> list[dict[str, Any]]:
    """Return a row for each kernel, model and storage."""
    rows = []
    for kernel in kernels():
        for model, numels in SHAPES.items():
            for storage in STORAGES:
                if storage.coded and kernel.name.startswith("first"):  # they had no codes
                    continue
                sized = launched(kernel, storage)
                taken = microseconds(numels, sized, storage)
                floor = storage.floor_bytes * sum(numels) / H200.bandwidth
                row = {"kernel": kernel.name, "model": model, "storage": storage.name, "ratio": taken["total"] / floor}
                rows.append({**row, "microseconds": taken, "in_flight_bytes": bytes_in_flight(sized, storage)})
    return rows


def main() -> None:
    """Compute, print, and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    rows = estimates()
    table = Table("kernel", *(f"{m} {s.name}" for m in SHAPES for s in STORAGES), title=TITLE)
    flight = Table("kernel", *(f"{s.name} {p}" for s in STORAGES for p in ("measure", "write")), title="COMPUTED KB in flight")
    for kernel in kernels():
        mine = {(row["model"], row["storage"]): row for row in rows if row["kernel"] == kernel.name}
        cells = [mine.get((model, storage.name)) for model in SHAPES for storage in STORAGES]
        table.add_row(kernel.name, *("-" if row is None else f"{row['ratio']:.2f}" for row in cells))
        sizes = [row["in_flight_bytes"].values() if row else (None, None) for row in cells[: len(STORAGES)]]
        flight.add_row(kernel.name, *("-" if size is None else f"{size / 1000:.0f}" for pair in sizes for size in pair))
    print_tables([table, flight])
    if given.output is not None:
        chip = dataclasses.asdict(H200)
        write_result(given.output, {"computed": True, "measured": False, "aims": AIMS, "constants": chip, "rows": rows})


if __name__ == "__main__":
    main()
