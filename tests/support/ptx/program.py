"""A compiled kernel as a list of instructions."""

from __future__ import annotations

import dataclasses
import re

REGISTERS = {"p": "?", "rs": "u2", "r": "u4", "rd": "u8", "f": "u4", "fd": "u8"}
"""numpy's name for the bits of a register, by the register's name."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    guard: the predicate that must hold in a lane, or not hold with `unless`; "" for all lanes.
    name: of the operation with its modifiers, as in "add.rn.f32".
    operands: in order; those of a vector together.
    """

    guard: str
    unless: bool
    name: str
    operands: tuple[tuple[str, ...], ...]
    text: str

    @property
    def parts(self) -> list[str]:
        """The name, divided."""
        return self.name.split(".")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A kernel.

    parameters: type and name of each, in order.
    threads: of a program on the grid.
    labels: number of the instruction after each.
    """

    parameters: list[tuple[str, str]]
    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]


def parsed(source: str) -> Program:
    """Return the only kernel of a module."""
    source = re.sub(r"//.*|::cta", "", source)
    signature, _, rest = source.partition(".entry")[2].partition(")")
    parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", signature.partition("(")[2])
    before, _, body = rest.partition("{")
    threads = re.search(r"\.reqntid\s+(\d+)", before)
    assert threads is not None, before
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body[: body.rindex("ret;") + 4].splitlines():
        found = re.match(r"\s*(\$\w+):(.*)", line)
        if found:
            labels[found.group(1)] = len(instructions)
            line = found.group(2)
        for statement in line.split(";"):
            text = re.sub(r"^\s*[{}]", "", statement).strip()  # a block with registers of its own, whose names have no %
            if text and not text.startswith("."):
                instructions.append(_instruction(text))
    return Program(parameters, int(threads.group(1)), instructions, labels)


def _instruction(text: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    assert found is not None, text
    unless, guard, name, operands = found.groups()
    return Instruction(guard or "", bool(unless), name, tuple(_operands(operands)), text)


def _operands(text: str) -> list[tuple[str, ...]]:
    """Return what commas or bars divide: a vector in braces, an address in brackets, a register or a constant."""
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", text)
    return [tuple(re.findall(r"[^\s,{}]+", piece)) if piece.startswith("{") else (piece,) for piece in pieces]
