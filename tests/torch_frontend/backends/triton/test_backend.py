"""The Triton backend from outside: when it is chosen, how it is refused, its tables, and its tests in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.torch_models import backend_of, slot_of, use_backend
from torch import nn

from penstock.core.errors import RefusedError, UnsupportedTensorError
from penstock.core.rules import ADAMW, LION
from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.triton import availability, work
from penstock.torch_frontend.backends.triton.configuration import (
    INTERPRETER,
    TABLE,
    Configuration,
    Device,
    configuration,
    wave_elements,
)

ROOT = Path(__file__).resolve().parents[4]
INTERPRETED = ["backends/triton/kernels", "release/test_combinations.py", "communication/test_combinations_over_ranks.py"]
"""Whose kernels are interpreted, in a process that does so from its start."""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": str(ROOT / "src")} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def test_the_laws_of_the_kernels_hold_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    """One process for all of them: to start one takes longer than most of its tests."""
    pytest.importorskip("triton")
    selection = ("-m", request.config.option.markexpr)  # as this run: with the exhaustive rows or without
    paths = [f"tests/torch_frontend/{path}" for path in INTERPRETED]
    done = python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *selection, *paths, TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_without_a_device_it_is_refused_with_the_remedy_and_auto_takes_another() -> None:
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(RefusedError, match=r"backend='triton'.*on cpu.*Move the model.*TRITON_INTERPRET=1"):
        StableAdamW([p], backend="triton")
    assert StableAdamW([p]).backend == "eager"


def test_without_triton_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RefusedError, match=r"Triton is not installed.*pip install triton"):
        AdamW([nn.Parameter(torch.zeros(3))], backend="triton")


def test_the_interpreter_follows_from_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False), ("true", True)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert availability.interpreted() is expected


def test_a_parameter_that_was_moved_away_is_refused_before_a_kernel_gets_its_address() -> None:
    pytest.importorskip("triton")
    from penstock.torch_frontend.backends.triton.backend import TritonBackend

    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], backend="eager")
    use_backend(optimizer, TritonBackend())
    p.grad = torch.ones(3)
    with pytest.raises(UnsupportedTensorError, match=r"on cpu.*backend='auto'"):
        optimizer.step()
    with torch.no_grad(), pytest.raises(UnsupportedTensorError, match="on cpu"):
        backend_of(optimizer).update(slot_of(optimizer, p), p.grad, first=True)
    assert torch.all(p == 1)


class OnDevice:
    """A tensor as `why_not` sees one: no GPU is needed to ask."""

    device = torch.device("cuda", 0)
    is_cuda = True
    shape = (3,)

    def is_contiguous(self) -> bool:
        return True


def test_auto_takes_it_on_a_device_where_it_can_run_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from penstock.torch_frontend.backends import select_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select_backend("auto", [OnDevice()], [ADAMW]).name == "triton"
    for rules in ([LION], [ADAMW, LION]):  # a group may name its rule
        assert select_backend("auto", [OnDevice()], rules).name == "eager"
    with pytest.raises(RefusedError, match=r"no kernels for lion; use backend='compiled', 'eager' or 'auto'"):
        select_backend("triton", [OnDevice()], [ADAMW, LION])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert availability.why_not([OnDevice()], ADAMW) is not None
    with pytest.raises(RefusedError, match=r"compute capability 7\.5.*8\.0"):
        select_backend("triton", [OnDevice()], [ADAMW])


# -- tables -------------------------------------------------------------------------------------------------------------


def test_items_cover_every_tensor_once_in_each_phase() -> None:
    numels = [1, 17, 8192, 8193, 100_000, 3]
    counts = work.item_counts(numels, 8192)
    assert counts == [1, 1, 1, 2, 13, 1]
    assert work.first_slots(counts) == [0, 1, 2, 3, 5, 18]
    table = work.tickets(numels, 8192, 20_000)
    assert table.dtype == np.int32
    for phase in (work.MEASURE, work.WRITE):
        rows = [tuple(row) for row in table[table[:, 0] == phase][:, 1:]]
        assert sorted(rows) == [(tensor, item) for tensor, count in enumerate(counts) for item in range(count)]


@pytest.mark.parametrize("wave", [1, 20_000, 10**9])
def test_a_tensor_is_measured_before_it_is_written_so_that_waiting_always_ends(wave: int) -> None:
    numels = [100, 50_000, 3, 70_000, 9_000, 9_000]
    table = work.tickets(numels, 8192, wave)
    for tensor in range(len(numels)):
        at = np.flatnonzero(table[:, 1] == tensor)
        assert np.all(np.diff(table[at, 0]) >= 0)
        written = table[at][table[at, 0] == work.WRITE][:, 2]
        assert np.all(np.diff(written) < 0)  # backward


def test_waves_keep_within_their_size_as_far_as_a_tensor_does() -> None:
    assert work.waves([5, 5, 5, 100, 1, 1], 10) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert work.waves([], 10) == []
    assert work.waves([7], 1) == [range(0, 1)]


def test_a_launch_of_one_phase_has_the_items_of_that_phase_only() -> None:
    counts, groups = [2, 1], [range(0, 2)]
    assert work.items(counts, groups, 1, (work.MEASURE,)).tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert work.items(counts, groups, 1, (work.WRITE,)).tolist() == [[1, 1, 0], [1, 0, 1], [1, 0, 0]]
    assert work.items([], [], 1).shape == (0, 3)


def test_at_most_a_wave_is_measured_ahead_of_a_write() -> None:
    """Of a large tensor the rest is measured after the write: else it would put what is written next out of the cache."""
    table = work.tickets([4, 1, 6, 2], 1, 2).tolist()
    assert table == [
        *([work.MEASURE, 0, item] for item in range(4)),
        [work.MEASURE, 1, 0],
        *([work.WRITE, 0, item] for item in (3, 2, 1, 0)),
        *([work.MEASURE, 2, item] for item in (0, 1)),
        [work.WRITE, 1, 0],
        *([work.MEASURE, 2, item] for item in (2, 3, 4, 5)),
        *([work.MEASURE, 3, item] for item in (0, 1)),
        *([work.WRITE, 2, item] for item in (5, 4, 3, 2, 1, 0)),
        *([work.WRITE, 3, item] for item in (1, 0)),
    ]


@pytest.mark.parametrize("chosen", [*TABLE.values()], ids=[f"{kind}-{dtype}" for kind, dtype in TABLE])
def test_a_configuration_is_possible(chosen: Configuration) -> None:
    for size in (chosen.block, chosen.tail, chosen.warps):
        assert size & (size - 1) == 0
    assert chosen.tail <= chosen.block
    if chosen.registers:
        assert chosen.programs * chosen.warps * 32 * chosen.registers <= 65536, "more programs than registers for them"


def test_a_configuration_follows_from_device_and_dtype() -> None:
    assert configuration(torch.device("cpu"), torch.float32) is INTERPRETER
    assert configuration(torch.device("cuda", 3), torch.bfloat16) is TABLE["cuda", None]
    assert configuration(torch.device("cuda", 3), torch.float64) is TABLE["cuda", torch.float64]
    assert wave_elements(Configuration(), Device(132, 60_000_000), 4) == 1_875_000
    assert wave_elements(Configuration(wave_bytes=4096), Device(132, 60_000_000), 4) == 1024


# -- streams ------------------------------------------------------------------------------------------------------------


class Stream:
    """A CUDA stream, as far as a table's upload concerns it."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Table:
    """A tensor on a device, as far as streams concern it."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.used_on: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_on.append(stream)


def test_another_stream_waits_for_a_table_and_keeps_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of equal sizes share a table of items, and nothing else orders their streams."""
    pytest.importorskip("triton")
    from penstock.torch_frontend.backends.triton import devices, memory

    own, other = Stream(0), Stream(1)
    table: Any = Table()
    uploaded = memory.Uploaded(table, cast(Any, own))
    for now, captured, waits in ((own, False, False), (other, False, True), (other, True, False)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, now=now: now)
        monkeypatch.setattr(devices, "stream_of", lambda device, now=now: now.cuda_stream)
        monkeypatch.setattr(devices, "capturing", lambda device, captured=captured: captured)
        table.used_on.clear()
        other.waited_for.clear()
        assert uploaded.here() is table
        assert (other.waited_for, table.used_on) == (([own], [other]) if waits else ([], []))
    assert own.waited_for == []
