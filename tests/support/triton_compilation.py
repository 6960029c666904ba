"""Offline compilation of the kernels: no GPU, no driver. What the compiler made of one specialisation, as numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.compiler
import triton.language as tl
from triton.backends.compiler import GPUTarget

from penstock.core.compensation import WITH_RANDOM_BITS
from penstock.torch_frontend.backends.triton.configuration import Configuration, with_sums
from penstock.torch_frontend.backends.triton.kernels import update_group, update_tensor

TYPES = {
    torch.float64: ("fp64", tl.float64),
    torch.float32: ("fp32", tl.float32),
    torch.bfloat16: ("bf16", tl.bfloat16),
    torch.float16: ("fp16", tl.float16),
    torch.int16: ("i16", tl.int16),
    torch.int8: ("i8", tl.int8),
    torch.uint8: ("u8", tl.uint8),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SCALARS = ("first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay")
OPTIONAL = ("step_ptr", "square_before", "norm_ptr", "applied_ptr", "numbers", "corrections", "norms")
"""Pointers that a launch may leave out."""
RANDOM = {
    "m_scales": "*fp32",
    "v_scales": "*fp32",
    **dict.fromkeys(("columns", "index_high", "index_low", "key", "update", "microbatch"), "i32"),
}
"""Arguments of a launch where something is rounded stochastically."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The dtypes of a specialisation. rows: with moments in 8 bits, what the length of a row is a multiple of."""

    parameter: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    compensation: str = "none"
    rows: int = 0
    stochastic: bool = False

    @property
    def kept(self) -> torch.dtype:
        return {"split": torch.int16, "split8": torch.int8}.get(self.compensation, self.parameter)

    @property
    def random(self) -> bool:
        return self.stochastic or self.compensation in WITH_RANDOM_BITS

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.parameter is torch.float64 else torch.float32

    @property
    def measured(self) -> list[torch.dtype]:
        """What the measure phase reads: g and v."""
        return [self.parameter, self.exp_avg_sq]

    @property
    def written(self) -> list[torch.dtype]:
        """What the write phase writes: m, v, p and k."""
        kept = [] if self.compensation in ("none", "stochastic") else [self.kept]
        return [self.exp_avg, self.exp_avg_sq, self.parameter, *kept]

    def __str__(self) -> str:
        dtypes = (self.parameter, self.exp_avg, self.exp_avg_sq)
        rows = [str(self.rows)] if self.rows else []
        return "-".join([str(dtype).removeprefix("torch.") for dtype in dtypes] + [self.compensation, *rows])


@dataclasses.dataclass(frozen=True)
class Code:
    """Figures of the machine code.

    registers: of a thread.
    spilled: bytes and instructions of a thread that go to local memory.
    loads, stores: of global memory, how many of each width in bytes.
    in_flight: bytes that a thread has asked for at once, at most, in each innermost loop with wide loads, in the order of the
        code; NVIDIA only.
    """

    registers: int
    spilled: int
    loads: Counter[int]
    stores: Counter[int]
    in_flight: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Audit:
    """What came out.

    assembly: PTX, or AMD's.
    binary: NVIDIA's machine code.
    limit: registers that the configuration allows; 0: as many as the compiler likes.
    arguments: names of the parameters of the compiled function, in order.
    """

    assembly: str
    binary: bytes | None
    limit: int
    arguments: tuple[str, ...]

    @functools.cached_property
    def code(self) -> Code:
        """Disassembled when it is looked at, which takes as long as to compile it."""
        return _amd(self.assembly) if self.binary is None else _nvidia(self.binary)


@contextlib.contextmanager
def compiler_for(target: GPUTarget) -> Iterator[None]:
    """Skip the test where this build of Triton cannot compile for the target."""
    try:
        yield
    except Exception as error:
        if target.arch == 100 and re.search(r"sm_100|not supported|unsupported|ptxas", str(error), re.IGNORECASE):
            pytest.skip(f"this compiler does not know sm_100: {error}")
        if target.backend == "hip" and "ROCm linker" in str(error):
            pytest.skip(f"this build of Triton has no linker for AMD: {error}")
        raise


def group_kernel(
    storage: Storage,
    target: GPUTarget,
    chosen: Configuration,
    present: tuple[str, ...] = (),
    kernel: Any = update_group,
    **changes: Any,
) -> Audit:
    """`update_group` as `update_all` launches it. `present`: the optional pointers that are there; `kernel`: a changed one."""
    wide = TYPES[storage.wide][0]
    constants = {
        "PHASES": "both", "CLIP": True, "ZERO1": False, "ZERO2": False, "L2": False,
        "MAXIMIZE": False, "COMPENSATION": storage.compensation, "STOCHASTIC": storage.stochastic, "ROWS": storage.rows,
        "EACH": False, "ALIGNMENT": 16, "HINTS": chosen.hints, "COMPUTE": TYPES[storage.wide][1],
        "G": TYPES[storage.parameter][1], "M": TYPES[storage.exp_avg][1], "V": TYPES[storage.exp_avg_sq][1],
        "P": TYPES[storage.parameter][1], "K": TYPES[storage.kept][1],
    } | changes  # fmt: skip
    given = {
        "items": "*i32", "tensors": "*i64", "partials": f"*{wide}", "squares": f"*{wide}", "corrections": f"*{wide}",
        "norms": f"*{wide}", "counters": "*i32", "item_count": "i32", "tensor_count": "i32", "applied_ptr": "*fp32",
        "numbers": f"*{wide}", **RANDOM,
    }  # fmt: skip
    present = (*present, *RANDOM) if storage.random else present
    if not storage.random:
        chosen = dataclasses.replace(chosen, registers=0)
    if "norms" in present:
        chosen = with_sums(chosen, 1 + constants["CLIP"])
    return _audited(kernel, given, constants, {"items", "tensors", "partials", "counters"}, target, chosen, present)


def tensor_kernel(
    storage: Storage,
    target: GPUTarget,
    chosen: Configuration,
    present: tuple[str, ...] = (),
    kernel: Any = update_tensor,
    **changes: Any,
) -> Audit:
    """`update_tensor` as release launches it."""
    wide = TYPES[storage.wide][0]
    constants = {
        "ACTION": "update", "FIRST": True, "CLIP": True, "ZERO1": False, "ZERO2": False, "L2": False, "MAXIMIZE": False,
        "COMPENSATION": storage.compensation, "STOCHASTIC": storage.stochastic, "ROWS": storage.rows,
        "ALIGNMENT": 16, "HINTS": chosen.hints, "COMPUTE": TYPES[storage.wide][1],
        "G": TYPES[storage.parameter][1], "M": TYPES[storage.exp_avg][1], "V": TYPES[storage.exp_avg_sq][1],
        "P": TYPES[storage.parameter][1], "K": TYPES[storage.kept][1],
    } | changes  # fmt: skip
    given = {
        **dict.fromkeys("gmvpk", "i64"), "n": "i64", "item_count": "i32", "step_ptr": "*fp32", "partials": f"*{wide}",
        "counters": "*i32", "square_before": f"*{wide}", "square_after": f"*{wide}", "norm_ptr": f"*{wide}",
        "applied_ptr": "*fp32", "numbers": f"*{wide}", **RANDOM,
    }  # fmt: skip
    present = (*present, *RANDOM) if storage.random else present
    if constants["ACTION"] == "accumulate":
        chosen = dataclasses.replace(chosen, registers=0)
    if "norm_ptr" in present:
        chosen = with_sums(chosen, 1 + constants["CLIP"])
    return _audited(kernel, given, constants, {"partials", "counters"}, target, chosen, present)


def _audited(
    kernel: Any,
    given: dict[str, str],
    constants: dict[str, Any],
    aligned: set[str],
    target: GPUTarget,
    chosen: Configuration,
    present: tuple[str, ...],
) -> Audit:
    names = kernel.arg_names
    given = given | dict.fromkeys(SCALARS, "fp32")
    constants = constants | {"TILES": chosen.tiles, "BLOCK": chosen.block, "TAIL": chosen.tail}
    constants |= {"UNROLL": 1 if constants["L2"] else chosen.unroll, "STAGES": chosen.stages}
    constants |= {name: None for name in (*OPTIONAL, *RANDOM) if name in names and name not in present}
    signature = {name: "constexpr" if name in constants else given[name] for name in names}
    source = _source(kernel, signature, constants, aligned)
    cap = {"maxnreg": chosen.registers} if chosen.registers else {}
    made = triton.compile(source, target=target, options={"num_warps": chosen.warps, "enable_fp_fusion": False, **cap})
    arguments = tuple(name for name in names if name not in constants)
    return Audit(made.asm.get("ptx") or made.asm["amdgcn"], made.asm.get("cubin"), chosen.registers, arguments)


def _source(kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: set[str]) -> Any:
    """What Triton compiles. A Triton with a class for attributes names the constants; a later one counts them."""
    names = kernel.arg_names
    descriptor = getattr(triton.backends.compiler, "AttrsDescriptor", None)
    if descriptor is not None:
        attributes = descriptor.from_hints({names.index(name): 16 for name in aligned})
        return triton.compiler.ASTSource(kernel, signature, constants, attributes)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compiler.ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)


def _nvidia(binary: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        assembly = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = (int(group) for group in found.groups())
    spills = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    loads, stores = (Counter(map(_width, re.findall(rf"\b{kind}(\.[A-Z0-9.x]+)", assembly))) for kind in ("LDG", "STG"))
    return Code(registers, stack + local + spills, loads, stores, _in_flight(assembly))


def _in_flight(assembly: str) -> tuple[int, ...]:
    """What the loops ask for before they use it: an instruction that reads a register waits for the load that fills it."""
    code, labels, loops = [], {}, []
    for line in assembly.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found.group(1)] = len(code)
        elif found := re.match(r"\s+/\*\w+\*/\s+(.*);", line):
            code.append(found.group(1))
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
            if target and target.group(1) in labels:
                loops.append((labels[target.group(1)], len(code)))
    innermost = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return tuple(most for a, b in innermost if (most := _outstanding(code[a:b])) > 0)


def _outstanding(body: list[str]) -> int:
    """The most bytes of wide loads that are outstanding, in two turns of a loop."""
    waiting: dict[int, set[int]] = {}  # the registers that a load fills, by its number
    most = 0
    for number, text in enumerate(body * 2):
        operation, _, operands = re.sub(r"^@!?U?P\d+\s+", "", text).partition(" ")
        registers = [int(register) for register in re.findall(r"\bR(\d+)", operands)]
        touched = set(registers)
        waiting = {load: filled for load, filled in waiting.items() if not filled & touched}
        if re.search(r"\bLDG\b.*\.128\b", operation):
            waiting[number] = set(range(registers[0], registers[0] + 4))
            most = max(most, 16 * len(waiting))
    return most


def _width(modifiers: str) -> int:
    wide = re.search(r"\.(256|128|64)\b", modifiers)
    if wide:
        return int(wide.group(1)) // 8
    return 2 if re.search(r"\.[US]16", modifiers) else 1 if re.search(r"\.[US]8", modifiers) else 4


def _amd(assembly: str) -> Code:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert found is not None, name
        return int(found.group(1))

    def widths(kind: str) -> Counter[int]:
        names = re.findall(rf"\b(?:global|buffer)_{kind}_([a-z0-9]+)", assembly)
        return Counter({"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}.get(name, 2) for name in names)

    spilled = count("vgpr_spill_count") + count("sgpr_spill_count")
    return Code(count("vgpr_count"), spilled, widths("load"), widths("store"))


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
