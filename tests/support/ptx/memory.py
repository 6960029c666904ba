"""Memory of a machine: the global one, which is that of this process, or the shared one of a program."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .races import Clocks, RaceError, Shadow

PIECE = 2**20
"""A multiple of every access, so that none is in two pieces."""


class OutsideError(Exception):
    """An access outside of what was given, or at an address that is not a multiple of its size."""


class Block:
    """Some bytes, and who accessed them."""

    def __init__(self, content: Any, clocks: Clocks) -> None:
        self.content, self._clocks = content, clocks

    @functools.cached_property
    def shadow(self) -> Shadow:
        """Made when the block is first accessed."""
        return Shadow(self._clocks, len(self.content))

    def load(self, at: Any, size: int, threads: Any) -> Any:
        """Return bytes [lanes, size] from the numbers `at`, [lanes]."""
        places = at[:, None] + np.arange(size)
        self.shadow.read(places, threads)
        return self.content[places]

    def store(self, at: Any, values: Any, threads: Any) -> None:
        """Store bytes [lanes, size]. Several threads may store the same, as that something is not finite."""
        places, first = np.unique(at, return_index=True)
        places = places[:, None] + np.arange(values.shape[1])
        if (self.content[places] != values[first]).any():
            self.shadow.write(places, threads[first])
            self.content[places] = values[first]
        if (self.content[at[:, None] + np.arange(values.shape[1])] != values).any():
            raise RaceError("two lanes store different values at one address")


class Memory:
    """Some bytes by their address, and no others. contents: at each first address."""

    def __init__(self, contents: dict[int, Any], clocks: Clocks) -> None:
        self._starts = np.array(sorted(contents), "u8")
        self._blocks = [Block(contents[start], clocks) for start in sorted(contents)]

    def blocks(self, addresses: Any, size: int) -> Iterator[tuple[Block, Any, Any]]:
        """Yield each block that some of these addresses are in, with their numbers among all and in the block."""
        numbers = np.searchsorted(self._starts, addresses, "right") - 1
        for number in dict.fromkeys(numbers.tolist()):
            chosen = np.flatnonzero(numbers == number)
            at = (addresses[chosen] - self._starts[number]).astype("i8")
            if number < 0 or int(at.max()) + size > len(self._blocks[number].content):
                raise OutsideError(f"{size} bytes at {addresses[chosen].max():#x}")
            if (addresses[chosen] % np.uint64(size)).any():
                raise OutsideError(f"{size} bytes at {addresses[chosen].max():#x}, which is not a multiple")
            yield self._blocks[number], chosen, at


def of_this_process(start: int, size: int) -> dict[int, Any]:
    """Return the bytes at an address of this process, in pieces, so that those that no one accesses take no memory."""
    ends = [*range((start // PIECE + 1) * PIECE, start + size, PIECE), start + size]
    starts = [start, *ends[:-1]]
    return {a: np.frombuffer((ctypes.c_uint8 * (b - a)).from_address(a), np.uint8) for a, b in zip(starts, ends, strict=True)}
