"""PyTorch against JAX: arrays cross as they are, and a fault in one of the frameworks is seen without a reference."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from penstock.parity.backends import JaxBackend, TorchBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.frameworks import Frameworks, Pair
from penstock.parity.progress import silent
from penstock.parity.rules import FAMILY, OTHERS

from .faults.injection import tampered

BOTH = [TorchBackend("eager"), JaxBackend()]


def rows(pattern: str, steps: tuple[int, ...] = (1, 3), **methods: Any) -> list[Row]:
    """What is found, where JAX's runs have wrong methods."""
    backend: Any = JaxBackend()
    correct = backend.start
    backend.start = lambda case: tampered(**methods)(correct, case)
    cases = [case for case in Frameworks().cases(quick=False) if pattern in case.name]
    return [row for row in Frameworks().run([BOTH[0], backend], cases, steps, silent) if isinstance(row, Row)]


@pytest.mark.parametrize("quick", [False, True])
def test_every_rule_and_dtype_has_a_pair_with_the_default_compensation(quick: bool) -> None:
    cases = Frameworks().cases(quick=quick)
    dtypes = ("float64", "float32", "bfloat16", "float16")
    others = set() if quick else {f"frameworks/{rule.name}/float32" for rule in OTHERS}
    assert {pair.name for pair in cases} == others | {f"frameworks/{rule}/{dtype}" for rule in FAMILY for dtype in dtypes}
    kept = {pair.case.problem.dtype: pair.case.storage.compensation for pair in cases}
    assert kept == {"float64": "none", "float32": "none", "bfloat16": "split", "float16": "kahan"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_frameworks_agree_and_their_arrays_cross_bit_for_bit(dtype: str) -> None:
    found = rows(f"stable_adamw/{dtype}")
    assert all(row.within for row in found)
    crossed = [row for row in found if " in " in row.quantity]
    assert [row.units for row in crossed] == [0] * 4  # both ways, at both steps
    assert {row.quantity for row in found if row.judged} >= {"parameter", "exp_avg", "exp_avg_sq"}
    (told, _) = (row for row in found if not row.judged)
    assert told.data is not None
    assert told.data["other"] == "eager"
    assert 0 <= told.data["differing"] < 0.01 * told.data["elements"]


def test_an_update_that_only_one_framework_makes_breaks_a_bound() -> None:
    def step(run: Any, correct: Any, gradients: Any) -> None:
        correct({name: 1.001 * g for name, g in gradients.items()})

    assert not all(row.within for row in rows("adam/float32", step=step))


def test_an_array_that_crosses_wrongly_is_seen() -> None:
    def swapped(run: Any, correct: Any) -> Any:
        return {
            name: {field: array[::-1] if array is not None and array.ndim else array for field, array in fields.items()}
            for name, fields in correct().items()
        }

    broken = {row.quantity for row in rows("adamw/bfloat16", arrays=swapped) if not row.within}
    assert "JAX's arrays in PyTorch" in broken
    assert "PyTorch's tensors in JAX" not in broken


def test_arrays_that_cannot_cross_are_compared_through_the_host_visibly(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(array: Any) -> None:
        raise BufferError("on another device")

    monkeypatch.setattr("torch.utils.dlpack.from_dlpack", elsewhere)
    pair = Frameworks().cases(quick=False)[0]
    told, *found = Frameworks().run(BOTH, [pair], (1,), silent)
    assert isinstance(told, Refusal)
    assert told.reason.endswith("as DLPack cannot cross: BufferError: on another device")
    assert [row.quantity for row in found if isinstance(row, Row) and row.judged] == ["parameter", "exp_avg", "exp_avg_sq"]


def test_an_error_is_a_broken_row_and_one_framework_alone_is_refused() -> None:
    pair: Pair = Frameworks().cases(quick=False)[0]
    for backend, other in zip(BOTH, reversed(BOTH), strict=True):
        (found,) = Frameworks().run([backend], [pair], (1,), silent)
        assert found == Refusal(pair.name, backend.name, f"it is compared with {other.name}, which does not run")

    def breaks(run: Any, correct: Any, gradients: Any) -> None:
        raise ArithmeticError("no numbers")

    (row,) = rows(pair.name, (1,), step=breaks)
    assert row.failure == "step 1: ArithmeticError: no numbers"
