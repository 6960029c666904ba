"""Every law of `triton_hand_off` can be broken: by a kernel that is compiled wrong, or by an instruction taken away."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.torch_frontend.backends.triton.availability import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from tests.support.rows import covering
from tests.support.triton_compilation import TOOLS, Audit, GPUTarget, Storage, compiler_for, group_kernel, tensor_kernel
from tests.support.triton_hand_off import broken_laws, ptx, reaches_all_threads

from penstock.torch_frontend.backends.triton import hand_off, kernels
from penstock.torch_frontend.backends.triton.configuration import Configuration

if not (TOOLS / "ptxas").exists():
    pytest.skip("this build of Triton has no ptxas", allow_module_level=True)

FLOAT32 = Storage(torch.float32, torch.float32, torch.float32)
SMALL = Configuration(block=128, tiles=2, tail=128, warps=4, registers=0)
HOPPER, AMD = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
LAUNCHES = {"group": (group_kernel, "update_group"), "tensor": (tensor_kernel, "update_tensor")}

ARRIVE = """    tl.store(partials + item, partial)
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == items - 1
"""
LATE = "".join(ARRIVE.splitlines(True)[line] for line in (2, 0, 1))
SUM = 'totals += tl.load(partials + slot, mask=slot < items, other=0.0, cache_modifier=".cg"'
ANNOUNCE = "                        tl.store(squares + tensor, total / elements(n, columns, ROWS).to(COMPUTE))\n"
WORSE = {
    "arrives first": (
        "group",
        ARRIVE,
        LATE,
        "a partial sum is stored before",
    ),
    "arrives relaxed": ("tensor", 'sem="acq_rel") == items - 1', 'sem="relaxed") == items - 1', "there are no arrivals"),
    "arrives in its block": ("group", '"acq_rel") == items', '"acq_rel", scope="cta") == items', "the scope of the device"),
    "sums too early": (
        "group",
        "    last = tl.atomic_add(arrived",
        '    partial = tl.sum(tl.load(partials + tl.arange(0, 128), cache_modifier=".cg"), 0)\n'
        "    tl.store(partials + item, partial)\n    last = tl.atomic_add(arrived",
        "partial sums are read after",
    ),
    "sums from the first-level cache": ("tensor", SUM, SUM.replace(".cg", ".ca"), "past the first-level cache"),
    "sums by floating-point atomics": (
        "group",
        ANNOUNCE,
        ANNOUNCE.replace("tl.store", "tl.atomic_add"),
        "every atomic is on the counters",
    ),
    "announces without a barrier": (
        "group",
        "    tl.debug_barrier()\n    tl.atomic_add(ready, 1",
        "    tl.atomic_add(ready, 1",
        "announcement",
    ),
    "announces relaxed": ("tensor", 'ready, 1, sem="release"', 'ready, 1, sem="relaxed"', "there are no announcements"),
    "announces first": (
        "group",
        ANNOUNCE + '                        if PHASES == "both":\n                            announce(arrived + 1)\n',
        '                        if PHASES == "both":\n                            announce(arrived + 1)\n' + ANNOUNCE,
        "a mean square is stored before it is announced",
    ),
    "waits relaxed": ("group", 'ready, 0, sem="acquire"', 'ready, 0, sem="relaxed"', "there are no waits"),
    "looks once": (
        "tensor",
        "while tl.atomic_add(ready, 0",
        "if tl.atomic_add(ready, 0",
        "wait",
    ),  # how depends on the compiler
    "does not wait": ("group", "wait(arrived + 1)", "pass", "nothing is read or written before waiting"),
    "looks before waiting": (
        "tensor",
        "                wait(counters + 3)\n",
        '                eta = lr * tl.load(square_after, cache_modifier=".cg")\n                wait(counters + 3)\n'
        "                lr = eta\n",
        "nothing is read or written before waiting",
    ),
    "looks in the first-level cache": (
        "group",
        'squares + tensor, cache_modifier=".cg"',
        "squares + tensor",
        "first-level cache",
    ),
    "resets without leaving": (
        "tensor",
        "    if TWO_PHASES:\n        if is_last_to_leave(counters + 1):",
        "    if TWO_PHASES:\n        if True:",
        "there are no leaves",
    ),
    "leaves relaxed": ("group", 'left, 1, sem="acq_rel"', 'left, 1, sem="relaxed"', "there are no leaves"),
}


def changed_kernels(directory: Path, old: str, new: str) -> Any:
    """The module of the kernels with a change of its source, or of the hand-off's."""
    sources = {module.__name__: Path(module.__file__ or "").read_text() for module in (hand_off, kernels)}
    counts = [source.count(old) for source in sources.values()]
    assert sum(counts) == 1, f"{old!r} is there {counts} times"
    changed = [source.replace(old, new) for source in sources.values()]
    load(directory, "changed_hand_off", changed[0])
    return load(directory, "changed_kernels", changed[1].replace("from .hand_off import", "from .changed_hand_off import"))


def load(directory: Path, name: str, source: str) -> Any:
    """A module beside the kernels, from a file, in which Triton looks up what it compiles."""
    path = directory / f"{name}.py"
    path.write_text(source)
    specification = importlib.util.spec_from_file_location(f"{kernels.__package__}.{name}", path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@functools.cache
def compiled(launch: str, target: GPUTarget) -> Audit:
    with compiler_for(target):
        return LAUNCHES[launch][0](FLOAT32, target, SMALL)


@pytest.mark.parametrize("name", WORSE)
def test_audit_finds_a_kernel_that_hands_over_wrongly(name: str, tmp_path: Path) -> None:
    launch, old, new, law = WORSE[name]
    compile_it, function = LAUNCHES[launch]
    worse = getattr(changed_kernels(tmp_path, old, new), function)
    audit = compile_it(FLOAT32, HOPPER, SMALL, kernel=worse)
    broken = broken_laws(audit.assembly, audit.arguments)
    assert any(law in found for found in broken), broken


def test_audit_finds_threads_that_part_on_amd(tmp_path: Path) -> None:
    """As LLVM compiles it without the barrier, the thread that takes tickets leaves a loop that the others never leave."""
    worse = changed_kernels(
        tmp_path, *re.findall(r"\n        tl\.debug_barrier\(\)  # .*", Path(kernels.__file__).read_text()), ""
    )
    with compiler_for(AMD):
        audit = tensor_kernel(FLOAT32, AMD, SMALL, kernel=worse.update_tensor)
    found = broken_laws(audit.assembly, audit.arguments)
    assert any("part in no loop" in law for law in found), "no longer needed: this compiler keeps them together"


INSTRUCTIONS = [
    (HOPPER, r"\.gpu\.(?=acquire|release|acq_rel|relaxed)", 6),
    (HOPPER, r"\.acquire(?=\.)", 1),
    (HOPPER, r"\.release(?=\.)", 1),
    (HOPPER, r"\.acq_rel(?=\.)", 2),
    (HOPPER, r"(?<=ld\.global)\.cg", 2),
    (
        HOPPER,
        r"(?:atom|ld)\.global\.gpu\.(?:relaxed|acq_rel|acquire)[^$]*?st\.shared[^\n]*\n[^\n]*\n\s*(bar\.sync \t0;)",
        5,
    ),
    (HOPPER, r"st\.global(?:(?!bar\.sync|\bbra\b)[^$])*(bar\.sync \t0;)(?=[^$]*?atom\.global\.gpu\.acq_rel)", 1),
    (HOPPER, r"(bar\.sync \t0;)(?=(?:(?!bar\.sync|\bbra\b)[\s\S])*?atom\.global\.gpu\.release)", 1),
    (AMD, r"buffer_wbl2 sc1", 3),
    (AMD, r"buffer_inv sc1", 3),
    (AMD, r"s_waitcnt vmcnt\(0\)(?=\s+(?:global_atomic|buffer_inv))", 6),
]


@pytest.mark.parametrize(("launch", "target", "pattern", "least"), covering(list(LAUNCHES), INSTRUCTIONS))
def test_audit_misses_no_instruction_of_the_hand_off(launch: str, target: GPUTarget, pattern: str, least: int) -> None:
    """Any one of them taken out of the assembly breaks a law."""
    audit = compiled(launch, target)
    assert broken_laws(audit.assembly, audit.arguments) == []
    places = [found.span(found.re.groups) for found in re.finditer(pattern, audit.assembly)]
    assert len(places) >= least
    for start, end in places:
        without = audit.assembly[:start] + audit.assembly[end:]
        assert broken_laws(without, audit.arguments), audit.assembly[start - 200 : end + 200]


@pytest.mark.parametrize(("lane", "one_warp"), [(0, True), (1, True), (0, False)])
def test_a_shuffle_reaches_all_threads_from_the_first_lane_of_the_only_warp(lane: int, one_warp: bool) -> None:
    """Which Triton 3.9 makes of an atomic in a program of one warp."""
    code = ptx(
        ".entry kernel()\n{\n"
        "@%p1 atom.global.gpu.relaxed.add.u32 %r1, [ %rd1 + 0 ], %r3;\n"
        f"shfl.sync.idx.b32 \t%r2, %r1, {lane}, 31, -1;\nret;\n$L__func_end0:\n"
    )
    assert reaches_all_threads(code, [0], [], one_warp=one_warp) is (lane == 0 and one_warp)
