"""Every backend of penstock is within every bound, section by section."""

from __future__ import annotations

import pytest

from penstock.core.errors import RefusedError
from penstock.parity import run
from penstock.parity.backends import choose
from penstock.parity.cases import all_cases, select
from penstock.parity.sections import select as select_sections
from penstock.parity.settings import SETTINGS

STARTED_AT_ONCE = ("numpy", "eager", "jax")
SETTINGS_TRIED = [setting.name for setting in SETTINGS if setting.name not in ("A", "B", "decay", "shapes", "large")]
OTHERS = ("lion", "sgd", "sgd_momentum", "sgdw_nesterov", "radam", "ranger_l2", "muon")
PROMISES = ("repeat", "resume", "skip", "frozen")

TRITON_WORKER = pytest.mark.xdist_group("triton worker")
COMPILED_EVENTS = ("clip-hold/stable_adamw/bfloat16", "schedule/adam/float64", "tied/adam/float64")

ROWS = [
    # updates
    ("numpy", "updates", (5,)),
    ("numpy", "nonfinite/lion/*", (3,)),  # whose last gradients are infinite
    *((backend, pattern, (1, 30)) for backend in ("eager", "jax") for pattern in ("B/*/state-default", "decay/adamw/*")),
    *((backend, "shapes/*/float32/*", (1, 100)) for backend in ("eager", "jax")),
    *((backend, f"{name}/stable_adamw/float32/*", (1, 30)) for backend in STARTED_AT_ONCE for name in SETTINGS_TRIED),
    *(("walk", f"{name}/adamw/float32/*", (1, 100)) for name in ("schedules", "decoupled", "nonfinite", "decay")),
    *(("walk", name, (1, 100)) for name in ("B/stable_adamw/*/state-default", "shapes/adam/float32/*")),
    ("walk", "B/adam/bfloat16/split/state-float32", (1, 100)),
    *(("compiled", f"B/stable_adamw/{kept}/state-default", (1, 100)) for kept in ("float32/none", "bfloat16/split")),
    ("compiled", "B/stable_adamw/bfloat16/kahan/state-default", (1, 100)),
    pytest.param("triton", "B/stable_adamw/bfloat16/split/state-default", (1, 3), marks=TRITON_WORKER),
    *((backend, f"B/{rule}/float32/*", (1, 30)) for backend in ("eager", "jax") for rule in OTHERS),
    *(
        (backend, f"{name}/adan/float32/*", (1, 30))
        for backend in ("eager", "jax")
        for name in ("shapes", "schedules", "betas")
    ),
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


@pytest.mark.parametrize(("backend", "pattern", "steps"), ROWS)
def test_a_backend_is_within_every_bound(backend: str, pattern: str, steps: tuple[int, ...]) -> None:
    """Of every case of the pattern: none of these is refused."""
    try:
        choose([backend])
    except RefusedError as why:
        pytest.skip(str(why))
    rows = run([backend], pattern, steps)
    assert [row for row in rows if not row.within] == []
    assert {row.case for row in rows} == names_of(pattern)
    if "/" in pattern and pattern.split("/")[0] in {setting.name for setting in SETTINGS}:
        cases = select(pattern)
        assert len(rows) == sum((1 + len(case.problem.rule.fields)) * len(case.problem.step_counts(steps)) for case in cases)


def names_of(pattern: str) -> set[str]:
    return {case.name for _, cases in select_sections(pattern) for case in cases}


def test_every_update_case_is_among_them() -> None:
    assert names_of("updates") == {case.name for case in all_cases()}
