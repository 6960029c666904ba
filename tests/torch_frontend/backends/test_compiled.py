"""The compiled backend: the same functions, no recompilation while training, compensation that survives the compiler."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rows import covering, rows
from tests.support.torch_models import (
    ADAM_FAMILY,
    OPTIMIZERS,
    MomentumSGD,
    batches,
    compiling_small_tensors,
    layers,
    loss_of,
    train,
)
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from penstock.core.reference import Gradient, Reference, Settings
from penstock.torch_frontend import AdamW, Adan, Lion, RAdam, StableAdamW, release_gradients
from penstock.torch_frontend.array_ops import compiled_ops, torch_ops
from penstock.torch_frontend.backends import compiler
from penstock.torch_frontend.backends.compiled import Graph

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _compiles() -> Iterator[None]:
    with compiling_small_tensors():
        yield


CODINGS = [
    (torch.float64, "none"),
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.bfloat16, "kahan"),
    (torch.bfloat16, "split"),
    (torch.float16, "kahan"),
    (torch.bfloat16, "stochastic"),
]


COVERED = [*ADAM_FAMILY, Lion, MomentumSGD, Adan]
OTHERS = [(each, torch.float32, "none") for each in OPTIMIZERS if each not in COVERED]


@pytest.mark.parametrize(
    ("optimizer_class", "dtype", "compensation"), [*covering(COVERED, CODINGS), *rows(OTHERS, lambda row: False)]
)
def test_compiled_agrees_with_eager(optimizer_class, dtype: torch.dtype, compensation: str) -> None:
    """Four steps: each may round sqrt, division and the mean differently, by one unit in the last place of the step."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in ((), (0,), (3,), (70, 80))]
    runs: dict[str, Any] = {}
    graphs = counters["stats"]["unique_graphs"]
    for backend in ("eager", "compiled"):
        parameters = [start.clone().requires_grad_() for start in starts]
        optimizer = optimizer_class(parameters, lr=1e-2, weight_decay=0.1, compensation=compensation, backend=backend)
        assert optimizer.backend == backend
        given = torch.Generator().manual_seed(1)
        for _ in range(4):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=given).to(dtype)
            optimizer.step()
        assert backend == "eager" or counters["stats"]["unique_graphs"] > graphs
        runs[backend] = (parameters, [optimizer.state[p] for p in parameters])
    for p, q in zip(runs["eager"][0], runs["compiled"][0], strict=True):
        torch.testing.assert_close(p, q, rtol=4 * torch.finfo(dtype).eps, atol=4e-2 * torch.finfo(dtype).eps)
    if compensation in ("kahan", "split"):
        for state in runs["compiled"][1][2:]:
            assert torch.count_nonzero(state["compensation"]) > 0.9 * state["compensation"].numel()


@pytest.mark.parametrize("optimizer_class", rows(ADAM_FAMILY, [AdamW].__contains__))
def test_float32_drifts_less_than_one_and_a_half_millionths(optimizer_class) -> None:
    """Setting B: lr 1e-4, decay 0.1, |p| about 1, 2000 steps, against float64."""
    generator = np.random.default_rng(3)
    start = (1 + 0.1 * generator.normal(size=64)).astype(np.float32)
    p = torch.tensor(start, requires_grad=True)
    optimizer = optimizer_class([p], lr=1e-4, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, backend="compiled")
    reference = Reference(Settings(optimizer.rule.name, 1e-4, (0.9, 0.99), 1e-6, 0.1), {"p": start})
    for _ in range(2000):
        gradient = generator.normal(size=64).astype(np.float32)
        p.grad = torch.tensor(gradient)
        optimizer.step()
        reference.run(Gradient("p", gradient))
    expected = reference.tensors["p"].parameter
    assert np.linalg.norm(p.detach().numpy() - expected) / np.linalg.norm(expected) < 1.5e-6


def test_the_rounding_survives_the_compiler_and_is_the_casts() -> None:
    """Bit for bit, over all exponents: ties, numbers below the normal ones, overflow, infinities, NaN."""
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = (torch.arange(2**16, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    halves = (torch.arange(2**19, dtype=torch.int64) << 13 | 0x1000).to(torch.int32)
    low = torch.arange(-66, 67) * 2.0**-25
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.996, 65520.0, -65520.0])
    x = torch.cat([*(given.view(torch.float32) for given in (patterns, ties, halves)), low, special])
    dtypes = ("bfloat16", "float16")

    def round_to_each(x: torch.Tensor) -> list[torch.Tensor]:
        return [compiled_ops.round_to(x, dtype) for dtype in dtypes]

    for rounding in (torch.compile(round_to_each, dynamic=True, fullgraph=True), round_to_each):
        for rounded, dtype in zip(rounding(x), dtypes, strict=True):
            expected = torch_ops.round_to(x, dtype)
            assert torch.equal(rounded.isnan(), expected.isnan())
            given = [torch.where(each.isnan(), 1.0, each).view(torch.int32) for each in (rounded, expected)]
            assert torch.equal(*given)


def test_nothing_is_compiled_again_while_training() -> None:
    model = layers(2)
    optimizer = StableAdamW(model.parameters(), lr=1e-2, backend="compiled")
    train(model, optimizer, batches(2))
    before = counters["stats"]["unique_graphs"]
    for i, batch in enumerate(batches(6)):
        group = optimizer.param_groups[0]
        group["lr"], group["weight_decay"], group["betas"] = 10.0 ** -(i + 2), 0.1 * i, (0.5 + 0.05 * i, 0.9 + 0.01 * i)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(77))]})
    for p in optimizer.param_groups[1]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize(
    ("optimizer_class", "dtype"),
    rows(
        itertools.product([*ADAM_FAMILY, MomentumSGD, RAdam, Adan], [torch.float32, torch.float64]),
        [(StableAdamW, torch.float64)].__contains__,  # torch starts to compile a graph of float64 scalars again
    ),
)
def test_state_accumulation_agrees_with_eager(optimizer_class, dtype) -> None:
    runs = []
    for backend in ("eager", "compiled"):
        model = layers(2, dtype=dtype)
        optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1, backend=backend)
        now = {"i": 0}
        release_gradients(model, optimizer, accumulation="state", sync=lambda now=now: now["i"] == 2)
        for i, batch in enumerate(batches(7)):  # the last group is short: step() applies what is in the moments
            now["i"] = i % 3
            loss_of(model, batch.to(dtype)).backward()
            if i in (2, 5, 6):
                optimizer.step()
        runs.append(model)
    for p, q in zip(*(model.parameters() for model in runs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_auto_is_eager_on_a_cpu() -> None:
    assert StableAdamW(layers(2).parameters()).backend == "eager"
    assert StableAdamW([torch.nn.Parameter(torch.zeros(2**24))]).backend == "eager"
    assert compiler.why_not("cpu") is None


def test_without_a_compiler_an_explicit_request_raises_and_auto_is_eager(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from penstock.torch_frontend import StableAdamW\n"
        "print(StableAdamW([torch.nn.Parameter(torch.zeros(2**24))]).backend)\n"
        "StableAdamW([torch.nn.Parameter(torch.zeros(3))], backend='compiled')\n"
    )
    environment = os.environ | {
        "CXX": str(tmp_path / "no-compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["eager"]
    last = [line for line in done.stderr.splitlines() if "RefusedError" in line][-1]
    assert "backend='compiled': torch.compile does not work here" in last
    assert "backend='eager'" in last


def test_any_layout_compiles_and_equals_eager() -> None:
    results = []
    for backend in ("eager", "compiled"):
        parameters = []
        for rank in range(1, 12):
            base = torch.zeros(rank + 1, 4, 2)
            parameters.append(base[..., :: 1 + rank % 2][:, ::2].copy_(torch.ones(())).requires_grad_())
        parameters = [p.detach().requires_grad_() for p in parameters]
        optimizer = StableAdamW(parameters, lr=1e-2, backend=backend)
        for p in parameters:
            p.grad = torch.ones(p.shape)
        optimizer.step()
        assert all(optimizer.state[p]["step"] == 1 for p in parameters)
        results.append(parameters)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


class VectorInstructions:
    """What torch has of them, on a processor that has avx2 only; a search is noticed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[bool | None] = []
        self.asked: list[list[str]] = []
        self.taken = True
        self.config = importlib.import_module("torch._inductor.config")
        self.module = importlib.import_module("torch._inductor.cpu_vec_isa")
        patch.setattr(self.module, "x86_isa_checker", lambda: ["avx2"])
        patch.setattr(self.module, "valid_vec_isa_list", lambda: self.told.append(self.config.cpp.vec_isa_ok))
        patch.setattr(compiler.subprocess, "run", self._run)

    def _run(self, command: list[str], **how: Any) -> Any:
        self.asked.append(command)
        return types.SimpleNamespace(returncode=0 if self.taken else 1)


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[VectorInstructions]:
    compiler.skip_vector_isa_search.cache_clear()
    yield VectorInstructions(monkeypatch)
    compiler.skip_vector_isa_search.cache_clear()


def test_torch_is_spared_its_search_if_the_compiler_takes_the_flags_of_this_processor(vectors: VectorInstructions) -> None:
    assert compiler.skip_vector_isa_search()
    (command,) = vectors.asked
    assert "-mavx2" in command
    assert "-mavx512f" not in command
    assert vectors.told == [True]
    assert vectors.config.cpp.vec_isa_ok is None


@pytest.mark.parametrize("how", ["flags refused", "set by the user", "names that torch does not have", "another processor"])
def test_the_search_is_left_to_torch(how: str, vectors: VectorInstructions, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "flags refused":
        vectors.taken = False
    elif how == "another processor":
        monkeypatch.setattr(vectors.module, "x86_isa_checker", list)
    elif how == "names that torch does not have":
        monkeypatch.delattr(vectors.module, "x86_isa_checker")
    with vectors.config.patch({"cpp.vec_isa_ok": False} if how == "set by the user" else {}):
        assert not compiler.skip_vector_isa_search()
    assert vectors.told == []


def test_nothing_is_compiled_ahead_of_time_where_the_caches_of_torch_are_off() -> None:
    """torch refuses it there: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."""

    class Compiled:
        def aot_compile(self, example: Any) -> Any:
            raise RuntimeError("Cannot precompile")

        def __call__(self, given: Any) -> Any:
            return given

    given = ((torch.ones(3),), torch.ones(2), None, None)
    with importlib.import_module("torch._inductor.config").patch(force_disable_caches=True):
        assert Graph(Compiled())(given) is given


@pytest.mark.parametrize("precision", ["exact", "compact", "smallest"])
def test_a_graph_reads_dtypes_that_can_be_vectorised(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Inductor's C++ has no vectors of int16: with one in a loop all of it is scalar, and takes three times as long."""
    found = set[torch.dtype]()

    def run(graph: Any, given: Any) -> Any:
        found.update(leaf.dtype for leaf in tree_leaves(given[0]) if leaf is not None)
        return None, 0.0, ()

    monkeypatch.setattr(Graph, "__call__", run)
    parameter = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    AdamW([parameter], backend="compiled", precision=precision).step()
    assert torch.bfloat16 in found
    assert found <= {torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.uint8}
