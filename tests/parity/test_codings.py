"""The section "codings": its definitions are monotone, its bounds leave almost no choice, and its cases have every coding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from penstock.core.codings import EIGHT_BIT
from penstock.core.combinations import AXES
from penstock.parity import backends as registry
from penstock.parity.codings import CodingCase, Codings
from penstock.parity.codings.cases import CASES
from penstock.parity.codings.definitions import Ends, stored_field, stored_parameter, words
from penstock.parity.codings.section import compared, run_case
from penstock.parity.compare import Refusal, Row

QUICK = Codings().cases(quick=True)
STORES: dict[str, Any] = {
    **{
        f"{dtype} {kind}": functools.partial(stored_parameter, dtype=dtype, compensation=kind)
        for dtype, kinds in (("bfloat16", ("none", "kahan", "split", "split8", "stochastic")), ("float16", ("stochastic",)))
        for kind in kinds
    },
    "8bit signed": functools.partial(stored_field, dtype=EIGHT_BIT, of_squares=False),
    "8bit squares": functools.partial(stored_field, dtype=EIGHT_BIT, of_squares=True),
}


def widths(pairs: list[tuple[np.ndarray, Ends]]) -> np.ndarray:
    """How far apart the right answers are, relative to them."""
    return np.concatenate([((ends.high - ends.low) / (np.abs(ends.value) + 1e-30)).reshape(-1) for _, ends in pairs])


@pytest.mark.parametrize("name", STORES)
def test_a_number_between_two_others_is_stored_between_them(name: str) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 200)) * 10.0 ** generator.uniform(-6.0, 0.0, (40, 200))
    x = np.abs(x) if name == "8bit squares" else x
    error = np.abs(x) * 10.0 ** generator.uniform(-6.0, -1.0, x.shape)
    bits = words(1, 1, 0, 0, x.shape)
    ends = STORES[name](x, error, bits=bits)
    assert (ends.low < ends.high).any()
    for _ in range(20):
        other = STORES[name](x + generator.uniform(-1.0, 1.0, x.shape) * error, np.zeros_like(x), bits=bits).value
        assert (ends.low <= other).all()
        assert (other <= ends.high).all()


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_nearly_every_element_has_one_right_answer(case: CodingCase) -> None:
    """Or, where a block's scale is known to a rounding only, answers within a few roundings."""
    (backend,) = registry.choose(["numpy"])[0]
    for quantity, pairs in compared(backend, case).items():  # type: ignore[arg-type]
        assert np.mean(widths(pairs) > 1e-5) < 0.02, quantity


@pytest.mark.parametrize("name", ["numpy", pytest.param("eager", marks=pytest.mark.exhaustive)])
def test_every_case_is_within_its_bounds(name: str) -> None:
    if name == "eager":
        pytest.importorskip("torch")
    (backend,) = registry.choose([name])[0]
    for case in CASES:
        rows = run_case(backend, case)
        assert len(rows) == 1 + len(case.rule.fields)
        assert all(isinstance(row, Row) and row.within for row in rows), case.name


def test_the_cases_have_every_coding_and_a_quick_run_all_that_is_rounded_by_chance() -> None:
    assert {case.storage.compensation for case in CASES} == set(AXES["compensation"])
    assert {case.states for case in CASES} == set(AXES["states"])
    assert {case.storage.compensation for case in QUICK} == {"split8", "stochastic"}
    assert {case.states for case in QUICK} >= {"stochastic", "8bit"}
    assert {case.micro_batches > 1 for case in QUICK} == {True, False}
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_backend_without_codings_is_named() -> None:
    (finding,) = run_case(registry.optax_transform("mine", {"adamw": lambda h: None}), CASES[0])
    assert isinstance(finding, Refusal)
    assert "RunsCodings" in finding.reason
