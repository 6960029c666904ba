import itertools
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.compensation import load, store
from penstock.parity.backends import choose
from penstock.parity.backends.protocol import is_peer
from penstock.parity.bounds import RoundingErrors, spacing, stored_spacing
from penstock.parity.cases import Case, select
from penstock.parity.compare import Row
from penstock.parity.truth import Truth, truths
from penstock.parity.updates import run_case

STARTED_AT_ONCE = [backend.name for backend in choose(None, quick=True)[0] if not is_peer(backend)]
MAGNITUDES = st.floats(2.0**-10, 2.0**10)


def truth_of(pattern: str, steps: list[int]):
    cases = select(pattern)
    found = truths(cases[0].problem, [case.storage for case in cases], steps)
    return cases, found


@given(MAGNITUDES)
def test_spacing_is_the_distance_to_the_next_number(x: float) -> None:
    for dtype in (np.float64, np.float32, np.float16):
        held = dtype(x)
        assert spacing(np.dtype(dtype).name, np.asarray(held, np.float64)) == np.spacing(held)
    held = ml_dtypes.bfloat16(x)
    above = (np.asarray(held).view(np.int16) + np.int16(1)).view(ml_dtypes.bfloat16)
    assert spacing("bfloat16", np.asarray(held, np.float64)) == float(above) - float(held)


@given(MAGNITUDES)
def test_half_a_stored_spacing_is_what_storing_can_lose(x: float) -> None:
    wide = np.asarray(x, np.float32)
    for dtype, compensation in (
        ("bfloat16", "none"),
        ("bfloat16", "kahan"),
        ("bfloat16", "split"),
        ("float16", "none"),
        ("float16", "kahan"),
    ):
        stored = store(numpy_ops, compensation, wide, dtype)
        assert stored.parameter.dtype == numpy_dtype(dtype)
        # just below a power of two, p may round up into the wider binade
        lost = abs(float(load(numpy_ops, compensation, stored)) - float(wide))
        assert lost <= stored_spacing(dtype, compensation, np.asarray(stored.parameter, np.float64)) / 2


@pytest.mark.parametrize("pattern", ["B/stable_adamw/*", "A/adam/*", "decay/adamw/*"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_bounds_grow_with_the_number_of_steps(pattern: str, dtype: str) -> None:
    counts = [1, 2, 5, 10, 20, 40]
    cases, found = truth_of(pattern.replace("/*", f"/{dtype}/*"), counts)
    for case in cases:
        bounds = [found[steps].bounds[case.storage]["parameter"] for steps in counts]
        for shorter, longer in itertools.pairwise(bounds):
            assert shorter.norm < longer.norm
            assert (shorter.elements < longer.elements).all()


def test_higher_precision_has_the_lower_bound() -> None:
    norms = []
    for pattern in ("bfloat16/none", "bfloat16/kahan", "float32/none", "float64/none"):
        _, found = truth_of(f"B/adamw/{pattern}/state-default", [50])
        (bounds,) = found[50].bounds.values()
        norms.append(bounds["parameter"].norm)
    assert norms == sorted(norms, reverse=True)


def test_one_step_is_bounded_by_the_roundings_themselves() -> None:
    _, found = truth_of("B/adamw/float32/none/state-default", [1])
    (bounds,) = found[1].bounds.values()
    units = bounds["parameter"].elements / spacing("float32", found[1].values["parameter"])
    assert units.min() >= 0.5
    assert units.max() < 0.55


@pytest.mark.parametrize("steps", [3, 30, 3000])
def test_the_model_bounds_simulated_roundings(steps: int) -> None:
    generator = np.random.default_rng(steps)
    half = np.exp(generator.uniform(-3.0, 0.0, 500))
    errors, total = RoundingErrors(500), np.zeros(500)
    for _ in range(steps):
        errors.add(half, np.ones(500, bool))
        total += generator.uniform(-half, half)
    bound = errors.bound()
    assert (np.abs(total) <= bound.elements).all()
    assert np.linalg.norm(total) <= bound.norm
    # and not by much: the norm concentrates
    assert bound.norm <= 1.5 * math.sqrt(steps / 3.0) * np.linalg.norm(half)


def test_correlated_roundings_add_up_linearly() -> None:
    errors = RoundingErrors(4)
    for _ in range(10):
        errors.add(np.ones(4), np.zeros(4, bool))
    assert np.array_equal(errors.bound().elements, np.full(4, 10.0))


def parameter_rows(backends: list[str], case: Case, found: Mapping[int, Truth]) -> list[Row]:
    """How far the parameters are off in one case on some backends, against a truth that is there already."""
    rows = [row for backend in choose(backends)[0] for row in run_case(backend, case, found)]
    return [row for row in rows if row.quantity == "parameter"]


ADAMW_ALONE = pytest.param("adamw", ["numpy"], marks=pytest.mark.exhaustive)
"""StableAdamW's recursions without its clipping, which its own row carries further."""


@pytest.mark.parametrize(("rule", "backends"), [("stable_adamw", STARTED_AT_ONCE), ADAMW_ALONE, ("adam", ["numpy"])])
def test_float32_after_2000_steps_of_setting_b(rule: str, backends: list[str]) -> None:
    (case,), found = truth_of(f"B/{rule}/float32/*", [2000])
    if rule != "adam":  # L2 makes the gradients of some elements all but constant: the worst case is derived for them
        norm = np.linalg.norm(found[2000].values["parameter"])
        assert found[2000].bounds[case.storage]["parameter"].norm / norm <= 1.5e-6
    rows = parameter_rows(backends, case, found)
    assert len(rows) == len(backends)
    for row in rows:
        assert row.within
        assert row.relative_bound <= 1.5e-6


@pytest.mark.parametrize(("rule", "backends"), [("stable_adamw", STARTED_AT_ONCE), ADAMW_ALONE])
def test_decay_survives_2000_steps_in_bfloat16(rule: str, backends: list[str]) -> None:
    cases, found = truth_of(f"decay/{rule}/bfloat16/*", [2000])
    assert np.abs(found[2000].values["parameter"] - 0.9802).max() < 1e-4
    bounds = {"split": 1e-4, "kahan": 0.01, "none": 0.03}  # kahan: at most half of the decay can round away
    for case in cases:
        compensation = case.storage.compensation
        rows = parameter_rows(backends if compensation == "split" else ["numpy"], case, found)
        assert rows
        for row in rows:
            assert row.within
            assert row.relative_bound <= bounds[compensation]


DERIVED = {
    "B/stable_adamw/float32/none/state-default": (9.61871e-06, 4.42854e-05, 8.04049e-06, 1.04276e-05, 8.33221e-05, 8.48946e-05),
    "B/adam/bfloat16/kahan/state-default": (0.0119664, 0.0126736, 0.164459, 0.165302, 0.000503205, 0.000496699),
    "B/stable_adamw/bfloat16/none/state-float32": (0.0613605, 0.0613905, 8.03598e-06, 1.04264e-05, 8.31357e-05, 8.48098e-05),
    "decay/adamw/bfloat16/split/state-default": (4.99833e-05, 5.00492e-05, 3.22229e-14, 1.46801e-13, 1.54705e-29, 4.27994e-29),
    "denormal/stable_adamw/bfloat16/none/state-default": (
        0.0192425,
        0.0192425,
        1.38965e-21,
        5.26723e-21,
        2.1251e-38,
        2.4087e-38,
    ),
    "huge/adam/float16/none/state-default": (0.0408957, 0.0410094, 42.4561, 181.387, 2818.63, 6166.37),
    "shapes/stable_adamw/float64/none/state-default": (
        3.9181e-14,
        1.32638e-13,
        2.61268e-14,
        3.59835e-14,
        3.30561e-13,
        3.78313e-13,
    ),
    "decoupled/adamw/float32/none/state-default": (
        7.87834e-06,
        3.28688e-05,
        6.70664e-06,
        8.25273e-06,
        5.53059e-05,
        5.66913e-05,
    ),
    "constant/adamw/float64/none/state-default": (1.73242e-13, 2.63977e-13, 1.38558e-14, 1.38558e-14, 1.92884e-14, 2.90177e-14),
}
"""After 62 steps, for parameter, exp_avg and exp_avg_sq: the bound of the norm, and the norm of the elements' bounds."""


@pytest.mark.parametrize("name", DERIVED)
def test_no_bound_becomes_wider_or_narrower_by_accident(name: str) -> None:
    """A derivation that changes on purpose changes these figures with it."""
    (case,), found = truth_of(name, [62])
    bounds = found[62].gradual[case.storage]
    figures = [number for bound in bounds.values() for number in (bound.norm, np.linalg.norm(bound.elements))]
    assert figures == pytest.approx(DERIVED[name], rel=1e-4, abs=0.0)
