"""Offline compilation of the kernels: no GPU, no driver. What the compiler made of one specialisation, as numbers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
import triton.compiler
import triton.language as tl
from triton.backends.compiler import GPUTarget

from penstock.torch_frontend.backends.triton.configuration import Configuration
from penstock.torch_frontend.backends.triton.kernels import update_group, update_tensor

TYPES = {
    torch.float64: ("fp64", tl.float64),
    torch.float32: ("fp32", tl.float32),
    torch.bfloat16: ("bf16", tl.bfloat16),
    torch.float16: ("fp16", tl.float16),
    torch.int16: ("i16", tl.int16),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SCALARS = ("first1", "log1", "first2", "log2", "lr", "eps", "floor", "decay")


@dataclasses.dataclass(frozen=True)
class Storage:
    """The dtypes of a specialisation."""

    parameter: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    compensation: str = "none"

    @property
    def kept(self) -> torch.dtype:
        return torch.int16 if self.compensation == "split" else self.parameter

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.parameter is torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True)
class Audit:
    """What came out.

    registers, spilled: of a thread; bytes of stack and local memory.
    loads, stores: how many accesses of each width in bytes.
    ptx: the assembly.
    """

    registers: int
    spilled: int
    loads: dict[int, int]
    stores: dict[int, int]
    ptx: str


def compiled(kernel: Any, given: dict[str, str], constants: dict[str, Any], aligned: set[str], target: GPUTarget, warps: int):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else given[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in given}
    source = triton.compiler.ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})


def group_kernel(storage: Storage, target: GPUTarget, chosen: Configuration, **changes: Any):
    """`update_group` as `update_all` launches it."""
    wide = TYPES[storage.wide][0]
    constants: dict[str, Any] = {
        "PHASES": "both", "CLIP": True, "L2": False, "MAXIMIZE": False, "COMPENSATION": storage.compensation,
        "STEP_ON_DEVICE": False, "ALIGNMENT": 16, "HINTS": chosen.hints,
        "G": TYPES[storage.parameter][1], "M": TYPES[storage.exp_avg][1], "V": TYPES[storage.exp_avg_sq][1],
        "P": TYPES[storage.parameter][1], "K": TYPES[storage.kept][1], "WIDE": TYPES[storage.wide][1],
        "TILES": chosen.tiles, "BLOCK": chosen.block, "TAIL": chosen.tail,
        "applied_ptr": None, "grad_scale_ptr": None, "numbers": None,
    }  # fmt: skip
    given = {
        "items": "*i32", "tensors": "*i64", "partials": f"*{wide}", "squares": f"*{wide}", "counters": "*i32",
        "item_count": "i32", "tensor_count": "i32", "applied_ptr": "*fp32", "grad_scale_ptr": "*fp32",
        "numbers": f"*{wide}", **dict.fromkeys(SCALARS, "fp32"),
    }  # fmt: skip
    return _audited(update_group, given, constants, changes, {"items", "tensors", "partials", "counters"}, target, chosen)


def tensor_kernel(storage: Storage, target: GPUTarget, chosen: Configuration, **changes: Any):
    """`update_tensor` as release launches it."""
    wide = TYPES[storage.wide][0]
    constants: dict[str, Any] = {
        "ACTION": "update", "FIRST": True, "CLIP": True, "L2": False, "MAXIMIZE": False,
        "COMPENSATION": storage.compensation, "HINTS": chosen.hints, "WIDE": TYPES[storage.wide][1],
        "TILES": chosen.tiles, "BLOCK": chosen.block, "TAIL": chosen.tail,
        "step_ptr": None, "square_before": None, "applied_ptr": None, "grad_scale_ptr": None, "numbers": None,
    }  # fmt: skip
    pointers = {
        "g_ptr": storage.parameter, "m_ptr": storage.exp_avg, "v_ptr": storage.exp_avg_sq, "p_ptr": storage.parameter,
        "k_ptr": storage.kept,
    }  # fmt: skip
    given = {
        **{name: f"*{TYPES[dtype][0]}" for name, dtype in pointers.items()},
        "step_ptr": "*fp32", "n": "i64", "item_count": "i32", "partials": f"*{wide}", "counters": "*i32",
        "square_before": f"*{wide}", "square_after": f"*{wide}", "applied_ptr": "*fp32", "grad_scale_ptr": "*fp32",
        "numbers": f"*{wide}", **dict.fromkeys(SCALARS, "fp32"),
    }  # fmt: skip
    return _audited(update_tensor, given, constants, changes, {*pointers, "partials", "counters"}, target, chosen)


def _audited(kernel, given, constants, changes, aligned, target, chosen) -> Audit:
    constants = {name: value for name, value in (constants | changes).items() if value != "given"}
    made = compiled(kernel, given, constants, aligned - set(constants), target, chosen.warps)
    if "cubin" not in made.asm:
        return _amd(made.asm["amdgcn"])
    return _nvidia(made.asm["cubin"], made.asm["ptx"])


def _nvidia(binary: bytes, ptx: str) -> Audit:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        assembly = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = (int(group) for group in found.groups())
    spills = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    widths = {kind: Counter(map(_width, re.findall(rf"\b{kind}(\.[A-Z0-9.x]+)", assembly))) for kind in ("LDG", "STG")}
    return Audit(registers, stack + local + spills, dict(widths["LDG"]), dict(widths["STG"]), ptx)


def _width(modifiers: str) -> int:
    wide = re.search(r"\.(256|128|64)\b", modifiers)
    if wide:
        return int(wide.group(1)) // 8
    return 2 if re.search(r"\.[US]16", modifiers) else 1 if re.search(r"\.[US]8", modifiers) else 4


def _amd(assembly: str) -> Audit:
    counts = {name: int(re.search(rf"\.{name}:\s*(\d+)", assembly).group(1)) for name in AMD_COUNTS}
    widths = {
        kind: Counter(
            {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}.get(name, 2)
            for name in re.findall(rf"\b(?:global|buffer)_{kind}_([a-z0-9]+)", assembly)
        )
        for kind in ("load", "store")
    }
    spilled = counts["vgpr_spill_count"] + counts["sgpr_spill_count"]
    return Audit(counts["vgpr_count"], spilled, dict(widths["load"]), dict(widths["store"]), assembly)


AMD_COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
