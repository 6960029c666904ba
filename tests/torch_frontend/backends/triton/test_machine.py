"""The machine that runs compiled kernels finds what they may do wrong, and each order that our kernels rely on."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ptx.machine import Machine, StuckError
from tests.support.ptx.memory import OutsideError
from tests.support.ptx.program import parsed
from tests.support.ptx.races import RaceError
from tests.support.torch_models import backend_of, slot_of

from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.backends.triton.availability import interpreted
from penstock.torch_frontend.backends.triton.configuration import TABLE

KERNEL = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.reqntid {threads}
{{
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.wide.u32 %rd2, %r1, 4, %rd1;
	shl.b32 %r3, %r1, 2;
	setp.eq.b32 %p1, %r1, 0;
	setp.eq.b32 %p2, %r2, 0;
	and.pred %p3, %p1, %p2;
{body}
	ret;
}}
"""
"""%rd1: the memory; %rd2: this thread's word of it; %r3: this thread's byte of shared memory; %p1, %p2, %p3: whether it is the
first thread of its program, whether that is the first program, and both."""

SHARED = "st.shared.b32 [ %r3 + 0 ], %r1; {} ld.shared.b32 %r4, [global_smem+{}]; st.global.b32 [ %rd2 + 0 ], {{ %r4 }};"
HANDED_ON = """
	@!%p2 bra $L_wait;
	@%p3 st.global.b32 [ %rd1 + 4 ], {{ %r5 }};
	@%p3 atom.global.gpu.{}.add.u32 %r4, [ %rd1 + 0 ], %r5;
	bra $L_end;
$L_wait:
	ld.global.gpu.{}.b32 {{ %r6 }}, [ %rd1 + 0 ];
	setp.eq.b32 %p4, %r6, 0;
	@%p4 bra $L_wait;
	ld.global.b32 {{ %r7 }}, [ %rd1 + 4 ];
	@%p1 st.global.b32 [ %rd1 + 8 ], {{ %r7 }};
$L_end:
	bar.sync 0;
"""
SEVEN = "mov.b32 %r5, 7;"
PARTED = """
	and.b32 %r4, %r1, 1;
	setp.eq.b32 %p4, %r4, 0;
	mov.b32 %r5, 10;
	@%p4 bra $L_even;
	mov.b32 %r5, 20;
$L_even:
	add.s32 %r5, %r5, %r1;
	st.global.b32 [ %rd2 + 0 ], { %r5 };
"""


def run(body: str, threads: int = 64, grid: int = 1, most: int = 10_000) -> Any:
    """Run a kernel in several orders; return the 64 words that it writes, which are the same in all."""
    program = parsed(KERNEL.format(threads=threads, body=body))
    results = []
    for seed in range(5):
        words = np.zeros(64, "u4")
        Machine(program, grid, [4096], {4096: words.view("u1")}, shared=4 * threads, seed=seed).run(most)
        results.append(words)
    assert all(np.array_equal(words, results[0]) for words in results)
    return results[0]


def test_a_barrier_orders_the_threads_of_a_program() -> None:
    assert (run(SHARED.format("bar.sync 0;", 252)) == 63).all()
    with pytest.raises(RaceError, match="after a write by thread 63"):
        run(SHARED.format("", 252))


def test_lanes_of_a_warp_are_not_ordered_by_running_together() -> None:
    with pytest.raises(RaceError):
        run(SHARED.format("", 124), threads=32)


def test_a_release_orders_what_is_acquired_in_another_program() -> None:
    assert run(SEVEN + HANDED_ON.format("acq_rel", "acquire"), grid=2)[:3].tolist() == [7, 7, 7]
    for weaker in (("relaxed", "acquire"), ("release", "relaxed")):
        with pytest.raises(RaceError, match="after a write by thread 0"):
            run(SEVEN + HANDED_ON.format(*weaker), grid=2)


def test_a_read_is_over_once_a_shuffle_has_handed_on_what_depends_on_it() -> None:
    """A write by another lane follows; without the shuffle it races."""
    read = "ld.global.b32 { %r4 }, [ %rd1 + 4 ]; "
    write = " mov.b32 %r5, 9; @%p1 st.global.b32 [ %rd1 + 4 ], { %r5 };"
    run(f"{read}shfl.sync.bfly.b32 %r6, %r4, 1, 31, -1;{write}", threads=32)
    with pytest.raises(RaceError, match="after a read"):
        run(read + write, threads=32)


def test_programs_that_wait_for_what_does_not_come_are_stuck() -> None:
    with pytest.raises(StuckError):
        run("mov.b32 %r5, 0;" + HANDED_ON.format("acq_rel", "acquire"), grid=2, most=1000)
    with pytest.raises(StuckError):
        run("setp.lt.u32 %p4, %r1, 32; @%p4 bra $L_end; bar.sync 0;\n$L_end:")


@pytest.mark.parametrize("place", ["[ %rd1 + 256 ]", "[ %rd1 + -4 ]", "[ %rd1 + 2 ]"])
def test_only_given_memory_is_accessed_and_at_multiples_of_the_size(place: str) -> None:
    with pytest.raises(OutsideError):
        run(f"@%p1 ld.global.b32 {{ %r4 }}, {place};")


def test_lanes_that_a_jump_parts_run_together_again() -> None:
    expected = [10 + lane if lane % 2 == 0 else 20 + lane for lane in range(64)]
    assert run(PARTED).tolist() == expected


def test_an_asynchronous_copy_arrives_when_it_is_waited_for() -> None:
    copy = "mov.b32 %r5, 3; @%p3 cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10; cp.async.commit_group; {}"
    then = " bar.sync 0; ld.shared.b32 %r4, [global_smem]; st.global.b32 [ %rd2 + 128 ], {{ %r4 }};"
    assert run((copy + then).format("cp.async.wait_group 0;"), threads=32).tolist() == [0] * 64
    with pytest.raises(AssertionError):
        assert run((copy + then).format("cp.async.wait_group 1;"), threads=32).tolist() == [0] * 64


# -- our kernels ----------------------------------------------------------------------------------------------------------


def updated(**settings: Any) -> list[torch.Tensor]:
    """A tensor of two items, which are short here, updated by three programs."""
    from tests.support.ptx.launching import on_machine

    with on_machine(programs=3, **settings), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(TABLE, ("cpu", None), dataclasses.replace(TABLE["cpu", None], tiles=2))
        p = torch.randn(3000, generator=torch.Generator().manual_seed(0)).requires_grad_()
        optimizer = StableAdamW([p], lr=1e-2, backend="triton")
        backend_of(optimizer).update(slot_of(optimizer, p), torch.cos(p), first=True)
        return [p.detach(), optimizer.state[p]["debiased_exp_avg_sq"]]


@pytest.mark.skipif(interpreted(), reason="an interpreted function cannot be compiled")
def test_our_kernels_give_the_same_bits_in_any_order_however_few_programs_are_resident() -> None:
    pytest.importorskip("triton")
    expected = updated()
    for resident in (1, 2, 3):
        assert all(map(torch.equal, expected, updated(resident=resident, seed=resident)))


@pytest.mark.skipif(interpreted(), reason="an interpreted function cannot be compiled")
def test_each_weaker_order_of_our_kernels_is_a_race_and_so_are_no_barriers() -> None:
    pytest.importorskip("triton")
    sources: list[str] = []
    updated(altered=lambda source: sources.append(source) or source)
    (source,) = sources
    orders = list(re.finditer(r"\.(acq_rel|acquire|release)\b", source))
    assert len(orders) == 4  # an arrival, the announcement, the wait for it, and leaving
    for order in orders:
        weaker = source[: order.start()] + ".relaxed" + source[order.end() :]
        with pytest.raises(RaceError):
            updated(altered=lambda _, weaker=weaker: weaker)
    with pytest.raises((RaceError, OutsideError)):  # of a ticket that is not there yet
        updated(altered=lambda _: re.sub(r"bar\.sync\s+0;", "", source))
