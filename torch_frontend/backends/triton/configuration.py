"""How the kernels are launched: one table, and no tuning at run time.

A kernel that writes in place cannot be tried out on the user's parameters, and a size that depended on timings would make
the order of sums, and so the bits, depend on them. The figures are computed, not measured: an item is long enough to hide
the latency of its ticket, a tile gives every thread 16 bytes of the narrowest array, the registers are the fewest with
which no kernel spills on any of sm_80, sm_90 and sm_100 (the audit in the tests sees to that), as many programs are
launched as they leave room for, and the wave is a quarter of the second-level cache, of which two waves and what is being
written use about half.
"""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Configuration:
    """The sizes of a launch. Two are equal if they are the same object: a program is looked up by it at every launch.

    Args:
        block: elements of a tile, a power of two.
        tiles: tiles of an item.
        tail: elements of a masked tile, a power of two of at most `block`.
        warps: of a program.
        registers: of a thread, at most; 0 leaves it to the compiler.
        programs: of a launch with tickets, on each multiprocessor.
        wave_bytes: bytes that are measured before they are written; 0 takes a quarter of the second-level cache.
        hints: tell the cache what is read again and what is not.
    """

    block: int = 1024
    tiles: int = 8
    tail: int = 128
    warps: int = 4
    registers: int = 72
    programs: int = 7
    wave_bytes: int = 0
    hints: bool = True

    @property
    def item(self) -> int:
        """Elements of an item."""
        return self.block * self.tiles


INTERPRETER = Configuration(block=128, tiles=8, tail=64, warps=1, registers=0, programs=2, wave_bytes=2**14)
"""A program costs milliseconds there, and a tile about the same whatever its size."""

WIDE = Configuration(block=512, tiles=8, registers=96, programs=5)
"""For float64 arithmetic: twice the registers an element."""

AMD = Configuration(warps=2, registers=0)
"""Warps are 64 threads there."""

TABLE: dict[tuple[str, torch.dtype | None], Configuration] = {
    ("cuda", None): Configuration(),
    ("cuda", torch.float64): WIDE,
    ("hip", None): AMD,
    ("hip", torch.float64): dataclasses.replace(AMD, block=512),
    ("cpu", None): INTERPRETER,
}
"""By kind of device ("hip" is AMD's, "cpu" the interpreter) and dtype of the parameter; None: any other."""

INTERPRETED_MULTIPROCESSORS = 2
INTERPRETED_CACHE = 2**16


@dataclasses.dataclass(frozen=True)
class Device:
    """What of a device matters: multiprocessors, and bytes of second-level cache."""

    multiprocessors: int
    cache_bytes: int

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Device:
        """The properties of a device; small ones for the interpreter."""
        if device.type != "cuda":
            return cls(INTERPRETED_MULTIPROCESSORS, INTERPRETED_CACHE)
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, getattr(properties, "L2_cache_size", 0) or 2**22)


def configuration(device: torch.device, dtype: torch.dtype) -> Configuration:
    """The row of the table for a parameter."""
    kind = "hip" if device.type == "cuda" and torch.version.hip is not None else device.type
    return TABLE.get((kind, dtype)) or TABLE[kind, None]


def wave_elements(chosen: Configuration, device: Device, measured_bytes: int) -> int:
    """Elements of a wave.

    Args:
        chosen: the configuration.
        device: whose cache it is.
        measured_bytes: bytes of an element that the measure phase reads.
    """
    return (chosen.wave_bytes or device.cache_bytes // 4) // measured_bytes
