"""Which backends agree on every bit, and what parts the others: the laws of docs/bits.md."""

import os
import platform
import subprocess
import sys
import types

import numpy as np
import pytest

from penstock.core.errors import RefusedError
from penstock.parity import Held, run
from penstock.parity.backends import choose
from penstock.parity.backends.calls import held_after
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.cases import Case, select
from penstock.parity.compare import Refusal, Row
from penstock.parity.differences import QUANTITIES, STEPS, Differences, differing_between
from penstock.parity.rules import FAMILY

EVERY_BIT = (*QUANTITIES, "compensation")
STORED = ("float64/none", "float32/none", "bfloat16/none", "bfloat16/kahan", "bfloat16/split", "float16/kahan")


def differing_after(names: list[str], pattern: str, steps: int) -> dict[str, int]:
    """By quantity, how many elements differ between two backends that were named, in the one case of this name."""
    (case,) = select(pattern)
    (one,), (other,) = (held_after(backend, case, [steps]) for backend in choose(names)[0])
    counts = {quantity: differing_between(one[1], other[1], quantity) for quantity in EVERY_BIT}
    return {quantity: count for quantity, count in counts.items() if count is not None}


@pytest.fixture
def correctly_rounded_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.sqrt on a CPU may be off by a unit in the last place; numpy's is correctly rounded, as IEEE 754 has it."""
    torch = pytest.importorskip("torch")
    from penstock.torch_frontend.backends import adam_piece

    def sqrt(x, out=None):
        exact = torch.from_numpy(np.asarray(np.sqrt(x.numpy())))
        return exact if out is None else out.copy_(exact)

    monkeypatch.setattr(adam_piece, "torch", types.SimpleNamespace(**{**vars(torch), "sqrt": sqrt}))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.usefixtures("correctly_rounded_sqrt")
def test_eager_is_the_specification_but_for_the_square_root(rule: str, stored: str) -> None:
    counts = differing_after(["numpy", "eager"], f"shapes/{rule}/{stored}/state-default", 62)
    assert set(counts) >= set(QUANTITIES)
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", FAMILY)
def test_the_moments_of_eager_are_the_specifications(rule: str, stored: str) -> None:
    """StableAdamW's too: the order of the sum and the square root do not touch them. Adam's L2 term brings the parameter in."""
    pytest.importorskip("torch")
    counts = differing_after(["numpy", "eager"], f"shapes/{rule}/{stored}/state-default", 62 if rule != "adam" else 1)
    assert (counts["exp_avg"], counts["exp_avg_sq"]) == (0, 0)


@pytest.mark.parametrize("stored", ["float32/none", "bfloat16/split"])
def test_compiled_is_the_specification(stored: str) -> None:
    """Inductor asks the C++ compiler to contract nothing to fused multiply-adds, and its square root is the processor's."""
    pytest.importorskip("torch")
    try:
        counts = differing_after(["numpy", "compiled"], f"B/adamw/{stored}/state-default", 62)
    except RefusedError as why:
        pytest.skip(str(why))
    assert set(counts.values()) == {0}


@pytest.mark.xdist_group("triton worker")
def test_the_triton_kernels_in_the_interpreter_are_the_specification() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    counts = differing_after(["numpy", "triton"], "shapes/adamw/float32/none/state-default", 5)
    assert set(counts.values()) == {0}


def test_the_walk_is_jax() -> None:
    pytest.importorskip("jax")
    counts = differing_after(["jax", "walk"], "B/adamw/float32/none/state-default", 62)
    assert set(counts.values()) == {0}


JAX_AGAINST_NUMPY = """
import dataclasses
import jax, numpy as np
from penstock.core.array_ops import numpy_ops
from penstock.core.rules.adam_family import Corrections, bias_corrections
from penstock.core.update import init_state, update
from penstock.jax_frontend.array_ops import jax_ops
from penstock.parity.cases import select

def differing(one, other):
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return int(np.count_nonzero(one.view(bits) != np.asarray(other).view(bits)))

def count(case):
    rule, kept, given = case.problem.rule, case.storage.compensation, case.problem.hyperparameters
    parameter = case.problem.initial_parameters()["matrix"]
    state = init_state(numpy_ops, case.problem.rule, parameter, case.storage.moments(case.problem), kept)

    @jax.jit
    def step(parameter, gradient, state, corrections, lr, decay):
        current = dataclasses.replace(given, learning_rate=lr, weight_decay=decay)
        return update(jax_ops, rule, current, Corrections(*corrections), kept, parameter, gradient, state)

    other, other_state = jax.numpy.array(parameter), jax.tree.map(jax.numpy.array, state)
    for number in range(1, 31):
        gradient, corrections = case.problem.gradients(number)["matrix"], bias_corrections(given, number, np)
        parameter, state = update(numpy_ops, rule, given, corrections, kept, parameter, gradient, state)
        numbers = [np.float32(each) for each in (*corrections, given.learning_rate, given.weight_decay)]
        other, other_state = step(other, gradient, other_state, tuple(numbers[:2]), *numbers[2:])
    after, others = ((*each.fields, each.compensation) for each in (state, other_state))
    pairs = [(parameter, other), *zip(after, others, strict=True)]
    return [differing(np.asarray(one), two) for one, two in pairs if one is not None]

print({case.name: count(case) for pattern in PATTERNS for case in select(pattern)})
"""


def jax_against_numpy(patterns: list[str], flags: str) -> dict[str, list[int]]:
    """In a process of its own: how many elements of parameter, moments and compensation differ after 30 steps, by case."""
    done = subprocess.run(
        [sys.executable, "-c", f"PATTERNS = {patterns!r}\n{JAX_AGAINST_NUMPY}"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flag is one of this instruction set")
def test_xla_without_fused_multiply_add_is_the_specification() -> None:
    """With corrections computed by the host, as numpy has them, jax.jit of the formula agrees on every bit."""
    pytest.importorskip("jax")
    patterns = [f"B/{rule}/{stored}/state-default" for rule in ("adamw", "adam") for stored in STORED[1:]]
    found = jax_against_numpy(patterns, "--xla_cpu_max_isa=AVX")
    assert len(found) == len(patterns)
    assert {count for counts in found.values() for count in counts} == {0}


class OneUnitOff(NumpyBackend):
    """The specification, but for one element of one moment."""

    name = "off"

    def start(self, case: Case) -> NumpyRun:
        return RunOneUnitOff(case)


class RunOneUnitOff(NumpyRun):
    def held(self):
        held = super().held()
        name, tensor = next(iter(held.items()))
        exp_avg = tensor.exp_avg.copy()
        exp_avg.flat[3] = np.nextafter(exp_avg.flat[3], np.float32(np.inf))
        return {**held, name: Held(**{**vars(tensor), "exp_avg": exp_avg})}


def test_the_section_counts_pairs_and_judges_none() -> None:
    section = Differences()
    found = list(section.run([NumpyBackend(), OneUnitOff()], section.cases(quick=True), (), lambda case, part: None))
    assert len(found) == len(FAMILY) * len(STEPS) * len(QUANTITIES)
    for row in found:
        assert isinstance(row, Row)
        assert not row.judged
        assert row.data == {"other": "off", "differing": int(row.quantity == "exp_avg"), "elements": 731}


def test_the_section_is_part_of_the_suite() -> None:
    rows = run(["numpy", "eager"], "differences/adamw/*") if "eager" in {b.name for b in choose(None)[0]} else []
    assert {(row.backend, row.data["other"]) for row in rows if row.data} <= {("numpy", "eager")}


def test_a_backend_that_cannot_run_the_case_is_refused_visibly() -> None:
    class Nothing(NumpyBackend):
        def refuses(self, case: Case) -> str | None:
            return "it runs nothing"

    section = Differences()
    found = list(section.run([Nothing()], section.cases(quick=True)[:1], (), lambda case, part: None))
    assert found == [Refusal("differences/stable_adamw/float32", "numpy", "it runs nothing")]
