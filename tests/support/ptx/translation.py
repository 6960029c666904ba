"""Translates instructions without memory or jumps to Python, which is then compiled: one function for each stretch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arithmetic
from .program import REGISTERS, Instruction

KINDS = {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8", "pred": "?"} | {
    f"{letter}{8 * size}": f"{'i' if letter == 's' else 'u'}{size}" for letter in "sub" for size in (1, 2, 4, 8)
}
"""numpy's name of a type of PTX; bfloat16 has none, and is handled as its bits."""

SPECIAL = {"%tid.x": "w.tid", "%ctaid.x": "w.cta", "%nctaid.x": "w.ctas", "%ntid.x": "w.ntid", "%laneid": "w.lane"}

TWO = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})",
    "shl": "shifted_left({0}, {1})", "shr": "shifted_right({0}, {1})", "rem": "remainder({0}, {1})",
}  # fmt: skip
ONE = {"abs": "np.abs({0})", "neg": "(-{0})", "not": "(~{0})", "mov": "{0}"}
ROUNDINGS = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


class Translation:
    """Translates, and numbers registers and constants. Quotients and roots are rounded correctly, where a GPU's may not be."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.constants: list[Any] = []
        self._names = {name: getattr(arithmetic, name) for name in dir(arithmetic) if not name.startswith("_")}
        self._names |= {"np": np, "K": self.constants}

    def function(self, instructions: list[Instruction]) -> Callable[[Any], None]:
        """Return a function of a warp that runs these instructions."""
        lines = ["def run(w):", "  G = w.registers"]
        if any(instruction.parts[0] in ("shfl", "redux") for instruction in instructions):
            lines.append("  w.exchange()")
        for instruction in instructions:
            lines += [f"  {line}" for line in self._lines(instruction)]
        names = dict(self._names)
        exec("\n".join(lines), names)
        return names["run"]

    def number(self, register: str) -> int:
        """Return the number of a register."""
        return self.registers.setdefault(register, len(self.registers))

    def kinds(self) -> list[str]:
        """Return the kinds of all registers, in the order of their numbers."""
        return [self.kind(name) for name in self.registers]

    def kind(self, register: str) -> str:
        """Return the kind of the bits of a register."""
        found = re.fullmatch(r"%([a-z]+)\d+", register)
        assert found is not None, register
        return REGISTERS[found.group(1)]

    def read(self, operand: str, kind: str) -> str:
        """Return an expression for an operand as this kind."""
        if operand in SPECIAL:
            return f"{SPECIAL[operand]}.astype('{kind}')"
        if operand.startswith("%"):
            own, name = self.kind(operand), f"G[{self.number(operand)}]"
            if own == kind:
                return name
            if own == "?" or kind == "?":
                raise NotImplementedError(f"{operand} as {kind}")
            size = int(kind[1])
            return f"{name}.view('{kind}')" if size == int(own[1]) else f"{name}.astype('u{size}').view('{kind}')"
        self.constants.append(np.full(32, _constant(operand, kind), kind))
        return f"K[{len(self.constants) - 1}]"

    def write(self, register: str, expression: str, kind: str, guard: str = "") -> str:
        """Return a statement that writes a value of this kind to a register, in the lanes of a guard."""
        own, number = self.kind(register), self.number(register)
        if own != kind:
            size = int(own[1])
            wide = expression if size == int(kind[1]) else f"{expression}.astype('{kind[0]}{size}')"
            expression = f"{wide}.view('{own}')"
        return f"G[{number}] = np.where({guard}, {expression}, G[{number}])" if guard else f"G[{number}] = {expression}"

    def guard(self, instruction: Instruction) -> str:
        """Return an expression for the lanes in which the instruction runs; "" for all."""
        if not instruction.guard:
            return ""
        return f"{'~' if instruction.unless else ''}{self.read(instruction.guard, '?')}"

    def _lines(self, instruction: Instruction) -> list[str]:
        guard = self.guard(instruction)
        return [self.write(register, value, kind, guard) for register, value, kind in self._results(instruction)]

    def _results(self, instruction: Instruction) -> list[tuple[str, str, str]]:
        """Return register, expression and kind of each result."""
        parts, operands = instruction.parts, instruction.operands
        base, kind = parts[0], KINDS.get(parts[-1], "")
        target, given = operands[0][0], [operand[0] for operand in operands[1:]]
        if base == "createpolicy":
            return []
        if base == "mov" and (len(operands[0]) > 1 or len(operands[1]) > 1):
            half = f"u{int(kind[1]) // 2}"
            if len(operands[0]) > 1:
                both = f"halves({self.read(given[0], kind)})"
                return [(name, f"{both}[{i}]", half) for i, name in enumerate(operands[0]) if name.startswith("%")]
            low, high = (self.read(name, half) for name in operands[1])
            return [(target, f"joined({low}, {high})", kind)]
        if base == "setp":
            return self._comparison(instruction)
        if base == "selp":
            yes, no = self.read(given[0], kind), self.read(given[1], kind)
            return [(target, f"np.where({self.read(given[2], '?')}, {yes}, {no})", kind)]
        if base == "cvt":
            return [(target, *self._conversion(parts, given))]
        if base in ("mul", "mad") and "wide" in parts:
            wide = f"{kind[0]}{2 * int(kind[1])}"
            a, b = (f"{self.read(name, kind)}.astype('{wide}')" for name in given[:2])
            return [(target, f"({a} * {b}{' + ' + self.read(given[2], wide) if base == 'mad' else ''})", wide)]
        if base == "shfl":
            if given[2:] not in (["31", "-1"], ["0", "-1"]):
                raise NotImplementedError(instruction.text)
            return [(target, f"exchanged('{parts[2]}', {self.read(given[0], 'u4')}, {self.read(given[1], 'i4')})", "u4")]
        if base == "redux":
            return [(target, f"np.full(32, np.{parts[2]}({self.read(given[0], kind)}))", kind)]
        if parts[-1] in ("s16x2", "u16x2") and base in TWO:
            a, b = (f"{self.read(name, 'u4')}.view('u2')" for name in given)
            return [(target, f"{TWO[base].format(a, b)}.view('u4')", "u4")]
        if base in ("shl", "shr", "bfe"):
            values = [self.read(given[0], kind), *(self.read(name, "u4") for name in given[1:])]
        else:
            values = [self.read(name, kind) for name in given]
        return [(target, self._value(base, parts, values), kind)]

    def _value(self, base: str, parts: list[str], values: list[str]) -> str:
        floats = parts[-1] in ("f32", "f64", "f16")
        if "ftz" in parts:
            values = [f"flushed({value})" for value in values]
        made = self._plain(base, parts, floats).format(*values)
        return f"flushed({made})" if "ftz" in parts else made

    def _plain(self, base: str, parts: list[str], floats: bool) -> str:
        if base in TWO:
            return TWO[base]
        if base in ONE:
            return ONE[base]
        if base in ("min", "max"):
            return f"np.{'f' + base if floats and 'NaN' not in parts else base + 'imum'}({{0}}, {{1}})"
        if base == "mul":
            return "high_half({0}, {1})" if "hi" in parts else "({0} * {1})"
        if base == "mad" or (base == "fma" and not floats):
            return "({0} * {1} + {2})"
        if base == "fma":
            return "fused({0}, {1}, {2})"
        if base == "div":
            return "np.divide({0}, {1})" if floats else "quotient({0}, {1})"
        if base == "sqrt":
            return "np.sqrt({0})"
        if base == "rcp":
            return "(1 / {0})"
        if base == "ex2":
            return "np.exp2({0})"
        if base == "lg2":
            return "np.log2({0})"
        if base == "bfe":
            return "field({0}, {1}, {2})"
        if base == "prmt":
            return "chosen_bytes({0}, {1}, {2})"
        if base == "lop3":
            return "looked_up({0}, {1}, {2}, {3})"
        raise NotImplementedError(".".join(parts))

    def _comparison(self, instruction: Instruction) -> list[tuple[str, str, str]]:
        parts = instruction.parts
        if parts[-1].endswith("x2"):
            half = "from_bfloat16(halves({})[{}])" if parts[-1] == "bf16x2" else "halves({})[{}].view('f2')"
            low, high, a, b = (operand[0] for operand in instruction.operands)
            pairs = [[half.format(self.read(name, "u4"), i) for name in (a, b)] for i in (0, 1)]
            return [
                (name, f"compared('{parts[1]}', {', '.join(pair)})", "?") for name, pair in zip((low, high), pairs, strict=True)
            ]
        kind = KINDS[parts[-1]]
        target, a, b, *more = (operand[0] for operand in instruction.operands)
        wide = "from_bfloat16({})" if parts[-1] == "bf16" else "{}"
        first, second = (wide.format(self.read(name, kind)) for name in (a, b))
        made = f"compared('{parts[1]}', {first}, {second})"
        if more:
            symbol = {"and": "&", "or": "|", "xor": "^"}[parts[2]]
            made = f"({made} {symbol} {self.read(more[0], '?')})"
        return [(target, made, "?")]

    def _conversion(self, parts: list[str], given: list[str]) -> tuple[str, str]:
        """Return the expression and its kind."""
        to, source = parts[-2], parts[-1]
        if to in ("bf16x2", "f16x2"):
            high, low = (self.read(name, "f4") for name in given)
            rounded = "to_bfloat16({})" if to == "bf16x2" else "{}.astype('f2').view('u2')"
            return f"joined({rounded.format(low)}, {rounded.format(high)})", "u4"
        value = self.read(given[0], KINDS[source])
        if source == "bf16":
            value, source = f"from_bfloat16({value})", "f32"
        if "ftz" in parts and source == "f32":
            value = f"flushed({value})"
        rounding = next((ROUNDINGS[part] for part in parts if part in ROUNDINGS), None)
        kind = KINDS[to]
        if to == "bf16":
            return f"to_bfloat16({value}.astype('f4'))", "u2"
        if source in ("f16", "f32", "f64") and kind[0] in "iu":
            return f"to_integer({value}, '{kind}', {rounding})", kind
        if rounding and source in ("f16", "f32", "f64"):
            return f"{rounding}({value}).astype('{kind}')", kind
        return f"{value}.astype('{kind}')", kind


def _constant(text: str, kind: str) -> Any:
    if text.startswith(("0f", "0d")) and len(text) in (10, 18):
        bits = int(text[2:], 16)
        return np.array(bits, "u4" if text.startswith("0f") else "u8").view(kind)
    if text == "global_smem":
        return 0
    bits = int(text.rstrip("U"), 0) & ((1 << 8 * np.dtype(kind).itemsize) - 1)
    return bool(bits) if kind == "?" else np.array(bits, f"u{np.dtype(kind).itemsize}").view(kind)
