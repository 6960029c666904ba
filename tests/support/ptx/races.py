"""Which accesses of memory are ordered, by vector clocks: two of one byte that are not, one of them a write, are a race.

PTX orders the accesses of a thread, those before a barrier of a program before those after it, and those before an atomic
operation with release semantics before those after one with acquire semantics that reads its value, or that of a later atomic
operation. Nothing else orders anything, not even that the lanes of a warp run together; but what one lane hands to another by a
shuffle depends on what it has read, so that its earlier reads are over when the other writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SMALL = 2**13
"""Bytes of a memory of which the last read by each thread is kept; of a larger one the last by any, others apart."""


class RaceError(Exception):
    """Two accesses that nothing orders."""


class Clocks:
    """For each thread, how much of every thread's past is over for it: of its writes (`known`), and of its reads (`read`)."""

    def __init__(self, threads: int) -> None:
        self.known = np.eye(threads, dtype=np.int32)
        self.read = self.known.copy()

    def shuffle(self, threads: slice) -> None:
        """Let these threads know what each of them has read."""
        self.read[threads] = self.read[threads].max(0)
        self._begin(threads)

    def barrier(self, threads: slice) -> None:
        """Let these threads know what each of them does."""
        for known in (self.known, self.read):
            known[threads] = known[threads].max(0)
        self._begin(threads)

    def release(self, thread: int) -> Any:
        """Return what a thread knows, and begin its next part."""
        given = np.stack([self.known[thread], self.read[thread]])
        self._begin(slice(thread, thread + 1))
        return given

    def _begin(self, threads: slice) -> None:
        """Begin the next part of each of these threads."""
        own = np.arange(threads.start, threads.stop)
        self.known[own, own] += 1
        self.read[own, own] += 1

    def acquire(self, thread: int, given: Any) -> None:
        """Let a thread know what another released."""
        for known, more in zip((self.known, self.read), given, strict=True):
            np.maximum(known[thread], more, out=known[thread])


class Shadow:
    """The last accesses of each byte of a memory: by which thread, and when; at time 0 if there was none.

    others: of a byte of a large memory that several threads read at once, the others than the last.
    atomics: by the first byte of a word, when each thread accessed it atomically.
    released: by the first byte of a word, what those knew who released its value.
    """

    def __init__(self, clocks: Clocks, size: int) -> None:
        self.clocks = clocks
        self._writer, self._written = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._reader, self._read = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._readers = np.zeros((size, len(clocks.known)), np.int32) if size <= SMALL else None
        self._others: dict[int, dict[int, int]] = {}
        self._atomics: dict[int, dict[int, int]] = {}
        self.released: dict[int, Any] = {}

    def read(self, at: Any, threads: Any) -> None:
        """Note a read. at: numbers of bytes, [lanes, bytes of each]; threads: [lanes]."""
        known, thread = self.clocks.known, threads[:, None]
        self._check_writes(at, thread)
        self._check_atomics(at, threads)
        now = np.broadcast_to(known[threads, threads][:, None], at.shape)
        if self._readers is not None:
            self._readers[at, thread] = now
            return
        before, then = self._reader[at], self._read[at]
        self._keep(known[thread, before] < then, at, before, then)
        if len(np.unique(at)) < at.size:
            self._keep(np.ones_like(at, bool), at, np.broadcast_to(thread, at.shape), now)
        self._reader[at], self._read[at] = thread, now

    def write(self, at: Any, threads: Any) -> None:
        """Note a write that changes something, as `read`; each byte by one lane."""
        thread = threads[:, None]
        self._check_writes(at, thread)
        self._check_reads(at, threads)
        self._check_atomics(at, threads)
        self._writer[at], self._written[at] = thread, self.clocks.known[threads, threads][:, None]
        if self._readers is not None:
            self._readers[at] = 0
        self._read[at] = 0
        for kept in (self._others, self.released):
            for byte in kept.keys() & set(at.ravel().tolist()):
                del kept[byte]

    def atomic(self, at: int, size: int, thread: int, *, writes: bool) -> None:
        """Note an atomic access of `size` bytes; it races with others that are not atomic."""
        places, threads = np.arange(at, at + size)[None], np.array([thread])
        self._check_writes(places, threads[:, None])
        if writes:
            self._check_reads(places, threads)
        self._atomics.setdefault(at, {})[thread] = int(self.clocks.known[thread, thread])

    def _keep(self, chosen: Any, at: Any, threads: Any, times: Any) -> None:
        for byte, thread, time in zip(at[chosen].tolist(), threads[chosen].tolist(), times[chosen].tolist(), strict=True):
            self._others.setdefault(byte, {})[thread] = time

    def _check_writes(self, at: Any, thread: Any) -> None:
        raced = self.clocks.known[thread, self._writer[at]] < self._written[at]
        if raced.any():
            raise RaceError(f"an access of byte {at[raced][0]} after a write by thread {self._writer[at][raced][0]}")

    def _check_reads(self, at: Any, threads: Any) -> None:
        known = self.clocks.read
        if self._readers is not None:
            raced = (known[threads][:, None, :] < self._readers[at]).any(-1)
        else:
            raced = known[threads[:, None], self._reader[at]] < self._read[at]
        if raced.any():
            raise RaceError(f"a write of byte {at[raced][0]} after a read")
        self._check(self._others, known, at, threads, "after a read")

    def _check_atomics(self, at: Any, threads: Any) -> None:
        self._check(self._atomics, self.clocks.known, at, threads, "beside an atomic access")

    def _check(self, accesses: dict[int, dict[int, int]], known: Any, at: Any, threads: Any, how: str) -> None:
        if not accesses:
            return
        for row, thread in zip(at.tolist(), threads.tolist(), strict=True):
            for byte in row:
                for other, time in accesses.get(byte, {}).items():
                    if known[thread, other] < time:
                        raise RaceError(f"an access of byte {byte} {how} by thread {other}")
