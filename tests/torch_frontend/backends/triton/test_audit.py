"""What the compiler makes of the kernels, for GPUs that are not here: registers, spills, widths of accesses, atomics."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from penstock.torch_frontend.backends.triton.availability import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from tests.support.rows import rows
from tests.support.triton_compilation import (
    RANDOM,
    SCALARS,
    TOOLS,
    Audit,
    GPUTarget,
    Storage,
    compiler_for,
    group_kernel,
    tensor_kernel,
)
from tests.support.triton_hand_off import broken_laws
from triton import language

from penstock.torch_frontend.backends.triton.configuration import TABLE, Configuration, resident_programs, with_random_bits
from penstock.torch_frontend.backends.triton.corrections import store_bias_corrections
from penstock.torch_frontend.backends.triton.kernels import update_group, update_tensor

for tool in ("ptxas", "cuobjdump", "nvdisasm"):
    if not (TOOLS / tool).exists():
        pytest.skip(f"this build of Triton has no {tool}", allow_module_level=True)

FLOAT32 = Storage(torch.float32, torch.float32, torch.float32)
FLOAT64 = Storage(torch.float64, torch.float64, torch.float64)
BFLOAT16 = Storage(torch.bfloat16, torch.bfloat16, torch.bfloat16)
SPLIT = Storage(torch.bfloat16, torch.bfloat16, torch.float32, "split")
KAHAN = Storage(torch.float16, torch.float16, torch.float32, "kahan")
SMALLEST = Storage(torch.bfloat16, torch.int8, torch.uint8, "stochastic", rows=128, stochastic=True)
COMPACT = Storage(torch.bfloat16, torch.int8, torch.uint8, "split8", rows=128, stochastic=True)
CODES_OF_FLOAT32 = Storage(torch.float32, torch.int8, torch.uint8, rows=128, stochastic=True)
SHORT_ROWS = dataclasses.replace(COMPACT, rows=16)
ODD_ROWS = dataclasses.replace(COMPACT, rows=1)
STOCHASTIC = Storage(torch.bfloat16, torch.bfloat16, torch.bfloat16, "stochastic", stochastic=True)
SPLIT8 = Storage(torch.bfloat16, torch.bfloat16, torch.float32, "split8")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HOPPER = TARGETS["sm_90"]
IN_FLIGHT, IN_FLIGHT_OF_AMPERE = 48_000, 40_000
"""Bytes on each multiprocessor: an H200 has twice the bandwidth of an A100. Float64 arithmetic has no registers for more."""
IN_FLIGHT_OF_CODES = 18_000
"""The same with random bits, whose arithmetic takes the registers."""

MOST_REGISTERS = 128
"""Four programs, or on AMD four waves of 64 threads, then fit on each processor."""

SPILLED = 0 if hasattr(language, "mul") else 16
"""Most bytes that a thread spills: the compiler of Triton 3.2 needs a few registers more than later ones."""


def chosen_for(target: GPUTarget, storage: Storage) -> Configuration:
    kind = target.backend
    chosen = TABLE.get((kind, storage.parameter)) or TABLE[kind, None]
    return with_random_bits(chosen, storage.rows) if storage.random else chosen


def threads(target: GPUTarget, storage: Storage) -> int:
    return chosen_for(target, storage).warps * target.warp_size


def elements_a_thread(target: GPUTarget, storage: Storage) -> int:
    return chosen_for(target, storage).block // threads(target, storage)


def wide_bytes(accesses: dict[int, int]) -> int:
    return sum(width * count for width, count in accesses.items() if width >= 16)


def expected_bytes(target: GPUTarget, storage: Storage, dtypes: list[torch.dtype]) -> int:
    """Of one thread and one tile, if every access is 16 bytes wide, but for what has less than that for a thread."""
    sizes = [elements_a_thread(target, storage) * dtype.itemsize for dtype in dtypes]
    return sum(size for size in sizes if size >= 16)


def compile_or_skip(kernel, storage: Storage, target: GPUTarget, *arguments, **changes) -> Audit:
    with compiler_for(target):
        return kernel(storage, target, chosen_for(target, storage), *arguments, **changes)


def assert_good(audit: Audit, target: GPUTarget, storage: Storage) -> None:
    assert audit.code.spilled <= SPILLED
    assert audit.code.registers <= (audit.limit or MOST_REGISTERS)
    assert not float_atomics(audit.assembly)


def float_atomics(assembly: str) -> list[str]:
    atomics = re.findall(r"\b(?:atom|red)\.\S+|\b(?:global|flat|buffer|ds)_atomic_\S+", assembly)
    return [atomic for atomic in atomics if re.search(r"[._]b?f(?:16|32|64)", atomic)]


def loaded(target: GPUTarget, storage: Storage) -> list[torch.dtype]:
    """What a launch with tickets reads of each element: to measure, in an unrolled loop and its remainder, and to write."""
    unroll = chosen_for(target, storage).unroll
    return [*storage.measured * (unroll + (unroll > 1)), storage.parameter, *storage.written]


def unhinted(assembly: str) -> list[str]:
    """Wide loads that do not tell the cache whether the data is read again."""
    return re.findall(r"\bld\.global(?!\S*evict_)\S*\.v\d\S*", assembly)


def assert_wide(audit: Audit, target: GPUTarget, storage: Storage, loads: list[torch.dtype]) -> None:
    """All that an interior tile reads and writes, in accesses of 16 bytes; nothing but tails and tables in others."""
    if target.backend == "cuda":
        assert wide_bytes(audit.code.loads) == expected_bytes(target, storage, loads)
        assert not unhinted(audit.assembly)
    else:  # there, rows of tables are read that wide as well
        assert wide_bytes(audit.code.loads) >= expected_bytes(target, storage, loads)
    assert wide_bytes(audit.code.stores) == expected_bytes(target, storage, storage.written)


def assert_in_flight(audit: Audit, target: GPUTarget, storage: Storage) -> None:
    """A multiprocessor's programs ask for enough bytes at once, in the loops that measure and write: not in a remainder."""
    if target.backend == "cuda":
        programs = resident_programs(audit.code.registers, chosen_for(target, storage).warps)
        in_flight = [size * threads(target, storage) * programs for size in audit.code.in_flight]
        enough = IN_FLIGHT if target.arch >= 90 and storage is not FLOAT64 else IN_FLIGHT_OF_AMPERE
        enough = IN_FLIGHT_OF_CODES if storage.random else enough
        assert sorted(in_flight)[-2] >= enough, in_flight


MANY = [
    *[("sm_90", storage) for storage in (FLOAT32, BFLOAT16, SPLIT, KAHAN, FLOAT64)],
    *[(name, storage) for name in ("sm_80", "sm_100", "gfx942") for storage in (FLOAT32, SPLIT, KAHAN)],
]


@pytest.mark.parametrize(("name", "storage"), rows(MANY, lambda row: row[0] == "sm_90" or row[1] is SPLIT), ids=str)
def test_the_launch_for_many_tensors_is_wide_unspilled_and_in_order(name: str, storage: Storage) -> None:
    target = TARGETS[name]
    present = ("numbers",) if storage is FLOAT64 else ()
    audit = compile_or_skip(group_kernel, storage, target, present)
    assert_good(audit, target, storage)
    assert_wide(audit, target, storage, loaded(target, storage))
    assert_in_flight(audit, target, storage)
    assert broken_laws(audit.assembly, audit.arguments) == []


ONE = [
    ("sm_90", FLOAT32, "update"),
    ("sm_90", SPLIT, "update"),
    ("sm_90", SPLIT, "accumulate"),
    ("sm_80", KAHAN, "accumulate"),
    ("sm_100", SPLIT, "accumulate"),
    ("sm_100", KAHAN, "accumulate"),
    ("sm_90", SPLIT, "apply"),
    ("sm_80", SPLIT, "update"),
    ("sm_100", SPLIT, "update"),
    ("sm_100", KAHAN, "update"),
    ("gfx942", SPLIT, "update"),
    ("sm_100", SPLIT, "norm"),
    ("sm_90", BFLOAT16, "norm"),
    ("sm_90", KAHAN, "norm"),
    ("sm_80", FLOAT32, "norm"),
    ("gfx942", SPLIT, "norm"),
]
SEEN_IN_OTHERS = [
    *[("sm_90", FLOAT32, "update"), ("sm_80", SPLIT, "update"), ("sm_100", SPLIT, "accumulate")],
    *[("sm_100", KAHAN, "accumulate"), ("sm_90", KAHAN, "norm"), ("sm_100", SPLIT, "norm"), ("gfx942", SPLIT, "norm")],
]
"""Target, storage and action: each pair of those of `ONE` that may differ is in a row that is left."""


@pytest.mark.parametrize(
    ("name", "storage", "action"),
    rows(ONE, lambda row: row not in SEEN_IN_OTHERS),
    ids=str,
)
def test_the_launch_for_one_tensor_is_wide_unspilled_and_in_order(name: str, storage: Storage, action: str) -> None:
    target = TARGETS[name]
    present = {"update": (), "norm": ("norm_ptr",), "accumulate": ("square_before",), "apply": ("square_before",)}[action]
    updates = action in ("update", "norm")
    audit = compile_or_skip(tensor_kernel, storage, target, present, ACTION="update" if updates else action, FIRST=updates)
    assert_good(audit, target, storage)
    if updates:
        assert broken_laws(audit.assembly, audit.arguments) == []
        assert_wide(audit, target, storage, loaded(target, storage))
        assert_in_flight(audit, target, storage)
    elif action == "accumulate":
        moments = [storage.exp_avg, storage.exp_avg_sq]
        assert wide_bytes(audit.code.loads) == expected_bytes(target, storage, [storage.parameter, *moments])
        assert wide_bytes(audit.code.stores) == expected_bytes(target, storage, moments)
    else:
        assert wide_bytes(audit.code.loads) == expected_bytes(target, storage, storage.written)
        assert wide_bytes(audit.code.stores) == expected_bytes(target, storage, [storage.parameter, storage.kept])


@pytest.mark.parametrize(
    ("kernel", "present", "changes"),
    rows(
        [
            (group_kernel, (), {"PHASES": "write", "CLIP": False}),
            (group_kernel, ("norms",), {"PHASES": "write", "CLIP": False}),
            (group_kernel, ("norms",), {}),
            (group_kernel, ("applied_ptr", "corrections"), {"PHASES": "measure"}),
            (group_kernel, ("applied_ptr", "corrections"), {"PHASES": "measure", "EACH": True}),
            (group_kernel, ("applied_ptr", "corrections"), {"PHASES": "write"}),
            (group_kernel, ("applied_ptr", "corrections"), {"PHASES": "write", "EACH": True}),
            (group_kernel, ("numbers", "corrections"), {"MAXIMIZE": True}),
            (tensor_kernel, ("step_ptr", "applied_ptr"), {"CLIP": False, "L2": True}),
            (tensor_kernel, ("square_before", "numbers"), {"FIRST": False}),
        ],
        lambda row: "applied_ptr" not in row[1] or "EACH" in row[2] or row[0] is tensor_kernel,
    ),
    ids=[
        "adamw",
        "adamw-norms",
        "norms",
        "measure",
        "measure-each",
        "write",
        "write-each",
        "capturable",
        "adam-checked",
        "last-micro-batch",
    ],
)
def test_other_forms_of_a_launch_are_unspilled_and_in_order(kernel, present: tuple[str, ...], changes: dict) -> None:
    audit = compile_or_skip(kernel, SPLIT, HOPPER, present, **changes)
    assert_good(audit, HOPPER, SPLIT)
    if changes.get("PHASES", "both") == "both":
        assert broken_laws(audit.assembly, audit.arguments) == []


def spilled_to_memory(audit: Audit) -> int:
    """On AMD scalar registers are spilled to lanes of vector registers."""
    if audit.binary is not None:
        return audit.code.spilled
    found = re.search(r"\.private_segment_fixed_size:\s*(\d+)", audit.assembly)
    assert found is not None
    return int(found.group(1))


RANDOM_LAUNCHES = [
    *itertools.product(TARGETS, [SMALLEST, COMPACT], ["group", "update"]),
    *itertools.product(["sm_80", "sm_90"], [CODES_OF_FLOAT32, STOCHASTIC, SPLIT8], ["group", "update"]),
    *itertools.product(["sm_90"], [SMALLEST, COMPACT, CODES_OF_FLOAT32], ["norm", "norms", "accumulate", "apply", "adamw"]),
]


@pytest.mark.parametrize(
    ("name", "storage", "launch"),
    rows(
        RANDOM_LAUNCHES,
        lambda row: row in (("sm_90", COMPACT, "group"), ("gfx942", SMALLEST, "update"), ("sm_90", SPLIT8, "update")),
    ),
    ids=str,
)
def test_launches_that_round_stochastically_are_wide_and_unspilled(name: str, storage: Storage, launch: str) -> None:
    """Codes in accesses of 16 bytes, as everything else; what they decode to is nowhere in memory."""
    target = TARGETS[name]
    if launch in ("group", "norms"):
        audit = compile_or_skip(group_kernel, storage, target, ("norms",) if launch == "norms" else ())
    elif launch == "adamw":
        audit = compile_or_skip(group_kernel, storage, target, PHASES="write", CLIP=False)
    else:
        updates = launch in ("update", "norm")
        present = {"update": (), "norm": ("norm_ptr",)}.get(launch, ("square_before",))
        action = "update" if updates else launch
        audit = compile_or_skip(tensor_kernel, storage, target, present, ACTION=action, FIRST=updates)
    assert spilled_to_memory(audit) == 0
    assert not float_atomics(audit.assembly)
    if launch in ("group", "update"):
        assert_wide(audit, target, storage, loaded(target, storage))
        assert_in_flight(audit, target, storage)
        assert broken_laws(audit.assembly, audit.arguments) == []


@pytest.mark.parametrize(
    "kernel", rows([group_kernel, tensor_kernel], lambda kernel: kernel is tensor_kernel), ids=["group", "tensor"]
)
def test_rows_without_whole_blocks_are_unspilled(kernel) -> None:
    """If their length is a multiple of 16, accesses are half as wide as with whole blocks; otherwise by elements."""
    for storage in (SHORT_ROWS, ODD_ROWS):
        audit = compile_or_skip(kernel, storage, HOPPER)
        assert audit.code.spilled == 0
        assert bool(wide_bytes(audit.code.loads)) is (storage is SHORT_ROWS)


@pytest.mark.parametrize("kernel", [update_group, update_tensor, store_bias_corrections], ids=lambda kernel: kernel.__name__)
def test_numbers_that_change_while_training_are_not_compiled_in(kernel) -> None:
    """No number that changes while training: learning rate, betas, decay, number of updates, sizes."""
    numbers = {*SCALARS, *"gmvpk", "item_count", "tensor_count", "n", *RANDOM} - {"m_scales", "v_scales"}
    parameters = {parameter.name: parameter for parameter in kernel.params}
    assert all(parameter.do_not_specialize for name, parameter in parameters.items() if name in numbers)
    others = {name for name, parameter in parameters.items() if not parameter.is_constexpr} - numbers
    pointers = {"items", "tensors", "partials", "squares", "counters", "numbers", "square_before", "square_after"}
    pointers |= {"m_scales", "v_scales", "corrections", "norms"}
    assert {name for name in others if not name.endswith("_ptr")} <= pointers


@pytest.mark.parametrize(("name", "storage"), [("sm_80", KAHAN), ("sm_90", KAHAN), ("sm_100", SPLIT)], ids=str)
def test_the_single_phase_of_adamw_sums_squares_unspilled_and_wide(name: str, storage: Storage) -> None:
    target = TARGETS[name]
    audit = compile_or_skip(tensor_kernel, storage, target, ("norm_ptr",), CLIP=False)
    assert_good(audit, target, storage)
    assert_wide(audit, target, storage, [storage.parameter, *storage.written])


def test_audit_sees_float_atomics_missing_hints_and_narrow_accesses() -> None:
    """So the figures above do depend on what is compiled: here for tensors that are not aligned to 16 bytes."""
    seen = "red.global.gpu.add.f32 atom.global.gpu.relaxed.add.u32 global_atomic_pk_add_bf16 global_atomic_add"
    assert float_atomics(seen) == ["red.global.gpu.add.f32", "global_atomic_pk_add_bf16"]
    assert unhinted(compile_or_skip(group_kernel, FLOAT32, HOPPER, HINTS=False).assembly)
    audit = compile_or_skip(group_kernel, FLOAT32, HOPPER, ALIGNMENT=4)
    assert wide_bytes(audit.code.loads) == wide_bytes(audit.code.stores) == 0
    assert_good(audit, HOPPER, FLOAT32)
