"""Launch configurations of the kernels: one table, without tuning at run time.

Tuning would have to run kernels that write in place on the user's parameters, and sizes that depend on timings would make
the order of sums, and so the bits, depend on them. The figures are computed, not measured: an item is long enough to hide
the latency of its ticket; a tile gives every thread 16 bytes of the narrowest array, and two tiles of two such arrays are the
48 KB in flight that a multiprocessor of an H200 needs; the registers are the fewest with which the launch of one tensor does
not spill on any of sm_80, sm_90 and sm_100 (a test audits this); a wave is an eighth of the second-level cache: as one half
of it may hold a copy of the other, two waves and the data being written use about half of what is left.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ....core.codings.eight_bit import BLOCK as SCALED


@dataclasses.dataclass(frozen=True, eq=False)
class Configuration:
    """The sizes of a launch. Compared by identity, because it is part of a dictionary key at every launch.

    Args:
        block: elements of a tile, a power of two.
        tiles: tiles of an item.
        tail: elements of a masked tile, a power of two of at most `block`.
        coded: elements of a tile of whole blocks in 8 bits, 512 for each warp.
        unroll: tiles that the measure phase loads before it uses the first one, all in registers.
        stages: tiles that it copies ahead to shared memory (cp.async), which takes no registers and no cache hints; 1: none.
        warps: warps of a program.
        registers: largest number of registers of a thread in the launch of one tensor; 0 leaves it to the compiler, which then
            takes fewer, and there asks for less at once. The launch of many tensors has no limit.
        programs: programs on each multiprocessor in a launch with tickets; 0: as many as the registers of the compiled kernel
            leave room for.
        wave_bytes: bytes that are measured before they are written; 0 means an eighth of the second-level cache.
        tickets: one launch that measures and writes; otherwise a pair of launches, where the device's cache is unknown.
        hints: give the cache eviction hints for data that is, or is not, read again.
    """

    block: int = 1024
    tiles: int = 16
    tail: int = 128
    coded: int = 4 * SCALED
    unroll: int = 2
    stages: int = 1
    warps: int = 4
    registers: int = 70
    programs: int = 0
    wave_bytes: int = 0
    tickets: bool = True
    hints: bool = True

    @property
    def item(self) -> int:
        """Number of elements of an item."""
        return self.block * self.tiles


INTERPRETER = Configuration(block=128, tiles=8, tail=64, unroll=1, warps=1, registers=0, programs=2, wave_bytes=2**14)
"""For Triton's interpreter, where a program takes milliseconds and the time of a tile hardly depends on its size."""

FLOAT64 = Configuration(block=512, unroll=1, registers=96)
"""For float64 arithmetic, which needs twice the registers per element."""

AMD = Configuration(coded=8 * SCALED, warps=2, registers=0, programs=7)
"""For AMD, where a warp has 64 threads."""

TABLE: dict[tuple[str, torch.dtype | None], Configuration] = {
    ("cuda", None): Configuration(),
    ("cuda", torch.float64): FLOAT64,
    ("hip", None): AMD,
    ("hip", torch.float64): dataclasses.replace(AMD, block=512),
    ("cpu", None): INTERPRETER,
}
"""Configurations by kind of device ("hip": AMD, "cpu": the interpreter) and dtype of the parameter (None: any other)."""

REGISTERS, THREADS = 2**16, 1536
"""What every NVIDIA GPU from sm_80 on has room for on a multiprocessor; registers are given out by eights."""

SUM_REGISTERS = (0, 8, 15)
"""Further registers for no, one or two sums: the fewest that do not spill. With 16 the compiler gives plain bfloat16 86 in all
on sm_90, which leave room for five programs and 41 KB in flight instead of six and 49 KB."""

INTERPRETED_MULTIPROCESSORS = 2
INTERPRETED_CACHE = 2**16


@dataclasses.dataclass(frozen=True)
class Device:
    """The properties of a device that determine a launch: its multiprocessors, and bytes of second-level cache."""

    multiprocessors: int
    cache_bytes: int

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Device:
        """Return the properties of a device; small figures for the interpreter."""
        if device.type != "cuda":
            return cls(INTERPRETED_MULTIPROCESSORS, INTERPRETED_CACHE)
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, getattr(properties, "L2_cache_size", 0) or 2**22)


def configuration(
    device: torch.device, dtype: torch.dtype, *, sums: int = 0, random: bool = False, rows: int = 0
) -> Configuration:
    """Return the configuration for a parameter on this device and of this dtype.

    Args:
        device, dtype: of the parameter.
        sums: how many sums over the tensor the launch of one tensor computes, if the gradient's squares are one of them.
        random, rows: whether something is rounded stochastically; `coding.multiple_of_rows`.
    """
    kind = "hip" if device.type == "cuda" and torch.version.hip is not None else device.type
    chosen = TABLE.get((kind, dtype)) or TABLE[kind, None]
    if random:
        chosen = with_random_bits(chosen, rows)
    return with_sums(chosen, sums) if sums else chosen


@functools.cache
def with_random_bits(chosen: Configuration, rows: int) -> Configuration:
    """Return the configuration of launches that round stochastically.

    A thread has 16 codes (8 on AMD), which it loads at once, and their arithmetic needs most of the registers that a thread can
    have. On NVIDIA GPUs a program is a single warp, so that neither sums nor scales on their way to the thread that stores them
    need a barrier, or predicates that tell warps apart: a thread has seven, and where the loops keep all of them, the compiler
    loads one array after the other. Rows without whole blocks need yet more registers, and get half a tile. A masked tile on
    AMD has two scales, so that they are stored as other data is: the audit knows a single one for the hand-off's.

    Args:
        chosen: without random bits.
        rows: what the length of a row is a multiple of, if moments are in 8 bits; otherwise 0.
    """
    if not rows:
        return dataclasses.replace(chosen, registers=96 if chosen.registers else 0)
    block = chosen.coded // (1 if rows == SCALED else 2)
    registers = 144 if rows == SCALED else 192
    return dataclasses.replace(
        chosen,
        block=block,
        tiles=min(chosen.item, chosen.tiles * chosen.coded) // block,
        tail=chosen.coded // 4,
        warps=chosen.coded // (4 * SCALED),
        registers=registers if chosen.registers else 0,
    )


@functools.cache
def with_sums(chosen: Configuration, sums: int) -> Configuration:
    """Return a configuration with the registers that its sums need."""
    return dataclasses.replace(chosen, registers=chosen.registers + SUM_REGISTERS[sums]) if chosen.registers else chosen


def resident_programs(registers: int, warps: int) -> int:
    """Return the number of programs that a multiprocessor of an NVIDIA GPU has room for, by the registers of a thread."""
    threads = 32 * warps
    return max(1, min(REGISTERS // (threads * -(-registers // 8) * 8), THREADS // threads))


def wave_elements(chosen: Configuration, device: Device, measured_bytes: int) -> int:
    """Return the number of elements of a wave.

    Args:
        chosen: the configuration.
        device: the device with the cache.
        measured_bytes: bytes per element that the measure phase reads.
    """
    return (chosen.wave_bytes or device.cache_bytes // 8) // measured_bytes
