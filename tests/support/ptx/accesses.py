"""The operations of PTX on memory, as functions of a warp."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .program import Instruction
from .translation import KINDS, Translation

if TYPE_CHECKING:
    from .machine import Warp

NAMES = ("ld", "ldmatrix", "st", "atom", "red", "cp")
Operation = Callable[["Warp"], None]


def operation(instruction: Instruction, translation: Translation) -> Operation:
    """Return the function of a warp that an instruction is."""
    parts = instruction.parts
    if parts[0] == "cp":
        return _copy(instruction, translation)
    if parts[0] == "ldmatrix":
        return _matrices(instruction, translation)
    if "param" in parts:
        return _parameter(instruction, translation)
    if parts[0] in ("atom", "red") or "acquire" in parts or "relaxed" in parts:
        return _atomic(instruction, translation)
    return _store(instruction, translation) if parts[0] == "st" else _load(instruction, translation)


def _parameter(instruction: Instruction, translation: Translation) -> Operation:
    (register,), (place,) = instruction.operands
    name, number, own = place.strip("[]"), translation.number(register), translation.kind(register)

    def load(warp: Warp) -> None:
        named, value = warp.machine.arguments[name]
        kind = KINDS[named]
        bits = np.array(value, kind).view(f"u{kind[1]}") if kind[0] == "f" else np.array(int(value) % 256 ** int(kind[1]), "u8")
        warp.registers[number] = np.full(32, bits, own)

    return load


def _load(instruction: Instruction, translation: Translation) -> Operation:
    registers, (place,) = instruction.operands[:2]
    numbers, kinds = [translation.number(name) for name in registers], [translation.kind(name) for name in registers]
    kind, space = KINDS[instruction.parts[-1]], instruction.parts[1]
    size = int(kind[1]) * len(registers)
    addresses, lanes_of = _addresses(place, translation), _lanes(instruction, translation)

    def load(warp: Warp) -> None:
        lanes = lanes_of(warp)
        loaded = np.empty((len(lanes), size), "u1")
        for block, chosen, places in warp.memory(space).blocks(addresses(warp)[lanes], size):
            loaded[chosen] = block.load(places, size, warp.threads[lanes[chosen]])
        for number, own, values in zip(numbers, kinds, loaded.view(kind).T, strict=True):
            warp.set(number, lanes, values.astype(f"{kind[0]}{own[1]}").view(own))

    return load


def _matrices(instruction: Instruction, translation: Translation) -> Operation:
    """Return a load of matrices of 8 by 8 halves: eight lanes name the rows of one, and each lane gets two neighbours."""
    registers, (place,) = instruction.operands
    assert instruction.parts[1:4] == ["sync", "aligned", "m8n8"], instruction.text
    assert "trans" not in instruction.parts, instruction.text
    numbers, addresses = [translation.number(name) for name in registers], _addresses(place, translation)
    lanes = np.arange(32)

    def load(warp: Warp) -> None:
        for matrix, number in enumerate(numbers):
            at = addresses(warp)[8 * matrix + lanes // 4] + (4 * (lanes % 4)).astype("u8")
            ((block, _, places),) = warp.memory("shared").blocks(at, 4)
            warp.set(number, lanes, block.load(places, 4, warp.threads).view("u4")[:, 0])

    return load


def _store(instruction: Instruction, translation: Translation) -> Operation:
    (place,), registers = instruction.operands
    numbers = [translation.number(name) for name in registers]
    kind, space = f"u{KINDS[instruction.parts[-1]][1]}", instruction.parts[1]
    size = int(kind[1]) * len(registers)
    addresses, lanes_of = _addresses(place, translation), _lanes(instruction, translation)

    def store(warp: Warp) -> None:
        lanes = lanes_of(warp)
        content = np.stack([warp.registers[number][lanes].astype(kind) for number in numbers], 1).view("u1")
        for block, chosen, places in warp.memory(space).blocks(addresses(warp)[lanes], size):
            block.store(places, content[chosen], warp.threads[lanes[chosen]])

    return store


def _atomic(instruction: Instruction, translation: Translation) -> Operation:
    """Return an atomic addition, with the word before it or without, or an atomic load, of a word of global memory."""
    parts, operands, adds = instruction.parts, [operand[0] for operand in instruction.operands], instruction.parts[0] != "ld"
    target = None if parts[0] == "red" else translation.number(operands.pop(0))
    place, value = operands[0], translation.number(operands[1]) if adds else 0
    assert {"gpu", "global"} <= {*parts}, instruction.text
    assert (KINDS[parts[-1]][1], "add" in parts) == ("4", adds), instruction.text
    releases, acquires = any(p in parts for p in ("release", "acq_rel")), any(p in parts for p in ("acquire", "acq_rel"))
    addresses, lanes_of = _addresses(place, translation), _lanes(instruction, translation)

    def access(warp: Warp) -> None:
        for lane in lanes_of(warp):
            thread, clocks = int(warp.threads[lane]), warp.machine.clocks
            ((block, _, (at,)),) = warp.memory("global").blocks(addresses(warp)[[lane]], 4)
            block.shadow.atomic(int(at), 4, thread, writes=adds)
            word = block.content[at : at + 4].view("u4")
            if target is not None:
                warp.set(target, np.array([lane]), word.copy())
            if adds:
                word += warp.registers[value][lane]
            known = block.shadow.released.get(int(at))
            if acquires and known is not None:
                clocks.acquire(thread, known)
            if releases:
                given = clocks.release(thread)
                block.shadow.released[int(at)] = given if known is None else np.maximum(given, known)

    return access


def _copy(instruction: Instruction, translation: Translation) -> Operation:
    """Return an asynchronous copy to shared memory, the end of a group of them, or a wait for all groups but the last ones.

    Shared memory is written as late as may be: when the copying threads have waited.
    """
    if "commit_group" in instruction.parts:
        return lambda warp: warp.copies.append([])
    if "wait_group" in instruction.parts:
        kept = int(instruction.operands[0][0], 0)
        return lambda warp: _finish(warp, kept)
    (target,), (place,), (size,), *more = instruction.operands
    count, lanes_of = int(size, 0), _lanes(instruction, translation)
    targets, addresses = _addresses(target, translation), _addresses(place, translation)
    given = translation.number(more[0][0]) if more else None

    def copy(warp: Warp) -> None:
        lanes = lanes_of(warp)
        content = np.zeros((len(lanes), count), "u1")
        read = np.full(32, count) if given is None else warp.registers[given]
        whole = np.flatnonzero(read[lanes] == count)  # the others write zeros
        assert (np.delete(read[lanes], whole) == 0).all(), instruction.text
        for block, chosen, places in warp.memory("global").blocks(addresses(warp)[lanes[whole]], count):
            content[whole[chosen]] = block.load(places, count, warp.threads[lanes[whole[chosen]]])
        warp.copies[-1].append((targets(warp)[lanes], content, warp.threads[lanes]))

    return copy


def _finish(warp: Warp, kept: int) -> None:
    """Write what all groups have copied but the last ones, of which the very last is not closed."""
    done = max(len(warp.copies) - 1 - kept, 0)
    for at, content, threads in itertools.chain(*warp.copies[:done]):
        for block, chosen, places in warp.memory("shared").blocks(at, content.shape[1]):
            block.store(places, content[chosen], threads[chosen])
    del warp.copies[:done]


def _addresses(place: str, translation: Translation) -> Callable[[Warp], Any]:
    """Return the function for the addresses of all lanes."""
    found = re.fullmatch(r"\[\s*(%\w+|global_smem)\s*(?:\+\s*(-?\w+))?\s*\]", place)
    assert found is not None, place
    offset = np.uint64(int(found.group(2) or "0", 0) % 2**64)
    if found.group(1) == "global_smem":
        constant = np.full(32, offset)
        return lambda warp: constant
    number = translation.number(found.group(1))
    return lambda warp: warp.registers[number].astype("u8") + offset


def _lanes(instruction: Instruction, translation: Translation) -> Callable[[Warp], Any]:
    """Return the function for the numbers of the lanes that run an instruction."""
    if not instruction.guard:
        return lambda warp: np.flatnonzero(warp.active)
    number, unless = translation.number(instruction.guard), instruction.unless
    return lambda warp: np.flatnonzero(warp.active & (warp.registers[number] != unless))
