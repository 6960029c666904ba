"""Every backend of penstock is within every bound, section by section."""

from __future__ import annotations

import pytest

from penstock.core.errors import RefusedError
from penstock.parity import run
from penstock.parity.backends import choose
from penstock.parity.cases import all_cases, select
from penstock.parity.sections import select as select_sections
from penstock.parity.settings import SETTINGS

BOTH = "eager jax"
STARTED_AT_ONCE = f"numpy {BOTH}"
NAMES = [setting.name for setting in SETTINGS]
SETTINGS_TRIED = [name for name in NAMES if name not in ("A", "B", "decay", "shapes", "large")]
PROMISES = ("repeat", "resume", "skip", "frozen")

TRITON_WORKER = pytest.mark.xdist_group("triton worker")
COMPILED_EVENTS = ("clip-hold/stable_adamw/bfloat16", "schedule/adam/float64", "tied/adam/float64")

ROWS = [
    # updates
    *(("numpy", f"{name}/*", (5,)) for name in NAMES if name != "large"),
    pytest.param("numpy", "large/*", (5,), marks=pytest.mark.exhaustive),  # one of them, in eager: test_planted.py
    ("numpy", "nonfinite/lion/*", (3,)),  # whose last gradients are infinite
    *((BOTH, f"B/{cases}/state-default", (1, 30)) for cases in ("*/float32/none", "*/bfloat16/split", "stable_adamw/*")),
    pytest.param(BOTH, "B/*/state-default", (1, 30), marks=pytest.mark.exhaustive),  # JAX compiles 109 programs
    (BOTH, "decay/adamw/*", (1, 30)),
    (BOTH, "shapes/*/float32/*", (1, 62)),  # of which the 61st is a spike
    *((STARTED_AT_ONCE, f"{name}/stable_adamw/float32/*", (1, 30)) for name in SETTINGS_TRIED),
    *(("walk", f"{name}/adamw/float32/*", (1, 100)) for name in ("schedules", "decoupled", "nonfinite", "decay")),
    *(("walk", name, (1, 100)) for name in ("B/stable_adamw/*/state-default", "shapes/adam/float32/*")),
    ("walk", "B/adam/bfloat16/split/state-float32", (1, 100)),
    ("compiled", "B/stable_adamw/bfloat16/split/state-default", (1, 100)),
    *(
        pytest.param("compiled", f"B/stable_adamw/{kept}/state-default", (1, 100), marks=pytest.mark.exhaustive)
        for kept in ("float32/none", "bfloat16/kahan")
    ),
    pytest.param("triton", "B/stable_adamw/bfloat16/split/state-default", (1, 3), marks=TRITON_WORKER),
    *((BOTH, f"{name}/adan/float32/*", (1, 30)) for name in ("schedules", "betas")),
    ("walk", "B/sgdw_nesterov/float32/*", (1, 30)),
    # codings
    pytest.param("walk", "codings/adamw/bfloat16/stochastic/state-8bit/in-state", (1,), marks=pytest.mark.exhaustive),
    # whole sequences of events
    ("numpy", "events", (1,)),
    *(("jax", f"events/{name}", (1,)) for name in COMPILED_EVENTS),
    *(("walk", f"events/{name}/stable_adamw/bfloat16", (1,)) for name in ("state-last-known", "overflow")),
    # promises to the bit
    *(("numpy", f"identity/{law}/*", (1,)) for law in PROMISES),
    ("eager", "identity", (1,)),
    *(("jax", f"identity/{law}/stable_adamw/bfloat16", (1,)) for law in ("repeat", "resume", "frozen")),
    ("walk", "identity/skip/stable_adamw/bfloat16", (1,)),
]


@pytest.mark.parametrize(("backends", "pattern", "steps"), ROWS)
def test_a_backend_is_within_every_bound(backends: str, pattern: str, steps: tuple[int, ...]) -> None:
    """Of every case of the pattern: none of these is refused. Several backends are compared with one truth."""
    names = available(backends.split())
    rows = run(names, pattern, steps)
    assert [row for row in rows if not row.within] == []
    assert {(row.backend, row.case) for row in rows} == {(name, case) for name in names for case in names_of(pattern)}
    if pattern.split("/")[0] in NAMES:
        cases = select(pattern)
        of_each = sum((1 + len(case.problem.rule.fields)) * len(case.problem.step_counts(steps)) for case in cases)
        assert len(rows) == len(names) * of_each


def available(names: list[str]) -> list[str]:
    """Those of some backends that run here; the test is skipped where none does."""
    found, reasons = [], []
    for name in names:
        try:
            choose([name])
            found.append(name)
        except RefusedError as why:
            reasons.append(str(why))
    if not found:
        pytest.skip(" ".join(reasons))
    return found


def names_of(pattern: str) -> set[str]:
    return {case.name for _, cases in select_sections(pattern) for case in cases}


def test_every_update_case_is_among_them() -> None:
    assert set().union(*(names_of(f"{name}/*") for name in NAMES)) == {case.name for case in all_cases()}
