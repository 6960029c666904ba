"""Runs a kernel: the warps of its programs, one at a time in a random order, each for a random while."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import accesses
from .accesses import Operation
from .memory import Memory
from .program import Instruction, Program
from .races import Clocks
from .translation import Translation

WHILES = (1, 2, 5, 20, 100, 1000)
"""For how many steps a warp runs before another is chosen."""


class StuckError(Exception):
    """Programs wait for what does not come."""


class Group:
    """One program of the grid: its warps, their shared memory, and which of them wait at a barrier."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.first = number * machine.program.threads
        noise = np.random.default_rng(number).integers(0, 256, machine.shared, np.uint8)
        self.shared = Memory({0: noise}, machine.clocks)
        self.warps = [Warp(self, lane) for lane in range(0, machine.program.threads, 32)]
        self._waiting: list[Warp] = []

    def arrive(self, warp: Warp) -> None:
        """Let a warp wait for the others; the last lets all go on."""
        self._waiting.append(warp)
        warp.runs = False
        if len(self._waiting) == len(self.warps):
            self.machine.clocks.barrier(slice(self.first, self.first + self.machine.program.threads))
            for other in self._waiting:
                other.runs = True
            self._waiting.clear()


class Warp:
    """32 lanes that run together.

    registers: an array over the lanes for each; they begin with random bits.
    active: the lanes that run; all, unless a jump has parted them.
    apart: where each lane goes on while they are apart.
    copies: the asynchronous copies that are not waited for yet, by groups.
    """

    def __init__(self, group: Group, first: int) -> None:
        self.group, self.machine = group, group.machine
        lanes = first + np.arange(32)
        self.threads = group.first + lanes
        self.tid, self.lane = lanes.astype("u4"), np.arange(32, dtype="u4")
        self.cta = np.full(32, group.number, "u4")
        self.ctas, self.ntid = np.full(32, self.machine.grid, "u4"), np.full(32, self.machine.program.threads, "u4")
        noise = np.random.default_rng(first)
        self.registers = [_noise(noise, kind) for kind in self.machine.code.kinds]
        self.next = 0
        self.apart: Any = None
        self.active: Any = np.ones(32, bool)
        self.copies: list[list[Any]] = [[]]
        self.runs = True
        self.ended = False

    def memory(self, space: str) -> Memory:
        """Return "global" or "shared" memory."""
        return {"global": self.machine.memory, "shared": self.group.shared}[space]

    def set(self, number: int, lanes: Any, values: Any) -> None:
        """Set a register in some lanes."""
        if len(lanes) < 32:
            kept = self.registers[number].copy()
            kept[lanes] = values
            values = kept
        self.registers[number] = values

    def exchange(self) -> None:
        """Note that lanes hand values to each other."""
        first = int(self.threads[0])
        self.machine.clocks.shuffle(slice(first, first + 32))

    def align(self) -> None:
        """Let the lanes wait for each other."""
        first = int(self.threads[0])
        self.machine.clocks.barrier(slice(first, first + 32))

    def step(self) -> None:
        """Run one operation, or a stretch of operations without memory; of lanes that are apart, those furthest behind."""
        if self.apart is None:
            self.next += 1
            self.machine.code.operations[self.next - 1](self)
            return
        self.next = int(self.apart.min()) + 1
        self.active = self.apart == self.next - 1
        self.apart = np.where(self.active, self.next, self.apart)
        before = list(self.registers)
        self.machine.code.operations[self.next - 1](self)
        assert self.runs, "a barrier or an end, where lanes are apart"
        for number, (old, new) in enumerate(zip(before, self.registers, strict=True)):
            if old is not new:
                self.registers[number] = np.where(self.active, new, old)
        self._join()

    def jump(self, taken: Any, target: int) -> None:
        """Let lanes go on elsewhere; others may go on where they are."""
        apart = np.full(32, self.next) if self.apart is None else self.apart
        self.apart = np.where(taken & self.active, target, apart)
        self._join()

    def end(self) -> None:
        """End the warp."""
        self.runs, self.ended = False, True

    def _join(self) -> None:
        if (self.apart == self.apart[0]).all():
            self.next, self.apart, self.active = int(self.apart[0]), None, np.ones(32, bool)


class Machine:
    """A grid of programs.

    Args:
        program: the kernel.
        grid: number of programs.
        arguments: the values of the kernel's parameters, in order.
        contents: the memory that it may touch: bytes by their first address.
        shared: bytes of a program's shared memory.
        resident: programs that run at once; 0 means all.
        seed: of the order in which warps run.
    """

    def __init__(
        self,
        program: Program,
        grid: int,
        arguments: Sequence[int | float],
        contents: dict[int, Any],
        *,
        shared: int = 0,
        resident: int = 0,
        seed: int = 0,
    ) -> None:
        self.program, self.grid, self.shared, self.resident = program, grid, max(shared, 16), resident or grid
        self.code, self.clocks = compiled(program), Clocks(grid * program.threads)
        self.memory = Memory(contents, self.clocks)
        self.random = random.Random(seed)
        self.steps = 0
        self.arguments = {name: (kind, value) for (kind, name), value in zip(program.parameters, arguments, strict=True)}

    def run(self, most: int = 10_000_000) -> None:
        """Run all programs to their end.

        Raises:
            RaceError, OutsideError, StuckError: what the kernel does wrong.
        """
        waiting = list(range(self.grid))
        groups: list[Group] = []
        with np.errstate(all="ignore"):
            while waiting or groups:
                while waiting and len(groups) < self.resident:
                    groups.append(Group(self, waiting.pop(0)))
                ready = [warp for group in groups for warp in group.warps if warp.runs]
                if not ready or self.steps > most:
                    raise StuckError(f"{len(groups)} programs after {self.steps} steps")
                self._run(self.random.choice(ready), self.random.choice(WHILES))
                groups = [group for group in groups if not all(warp.ended for warp in group.warps)]

    def _run(self, warp: Warp, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            try:
                warp.step()
            except Exception as error:
                number = max(number for number, place in self.code.places.items() if place < warp.next)
                error.add_note(f"thread {warp.threads[0]}, instruction {number}: {self.program.instructions[number].text}")
                raise
            if not warp.runs:
                return


class Code(NamedTuple):
    """A program as functions of a warp.

    kinds: of the bits of each register.
    places: of the instructions that begin an operation, by their numbers.
    """

    operations: list[Operation]
    kinds: list[str]
    places: dict[int, int]


@functools.cache
def compiled(program: Program) -> Code:
    """Return the code of a program. A stretch of instructions without memory or jumps is one operation."""
    translation = Translation()
    operations: list[Operation] = []
    places: dict[int, int] = {}
    stretch: list[Instruction] = []
    starts = set(program.labels.values())
    for number, instruction in enumerate(program.instructions):
        special = instruction.parts[0] in (*accesses.NAMES, "bra", "bar", "ret")
        if stretch and (special or number in starts):
            operations.append(translation.function(stretch))
            stretch = []
        if not stretch:
            places[number] = len(operations)
        if special:
            operations.append(_operation(instruction, program, translation, places))
        else:
            stretch.append(instruction)
    assert not stretch, "a kernel ends with ret"
    return Code(operations, translation.kinds(), places)


def _operation(instruction: Instruction, program: Program, translation: Translation, places: dict[int, int]) -> Operation:
    base = instruction.parts[0]
    if base == "ret":
        return Warp.end
    if base == "bar":
        assert (instruction.name, *instruction.operands) in (("bar.sync", ("0",)), ("bar.warp.sync", ("-1",)))
        return Warp.align if "warp" in instruction.parts else lambda warp: warp.group.arrive(warp)
    if base != "bra":
        return accesses.operation(instruction, translation)
    label = program.labels[instruction.operands[0][0]]
    if not instruction.guard:
        return lambda warp: warp.jump(True, places[label])
    number, unless = translation.number(instruction.guard), instruction.unless
    return lambda warp: warp.jump(warp.registers[number] != unless, places[label])


def _noise(random: Any, kind: str) -> Any:
    """Return 32 random values."""
    if kind == "?":
        return random.integers(0, 2, 32).astype(bool)
    return random.integers(0, 256, 32 * int(kind[1]), np.uint8).view(kind)
