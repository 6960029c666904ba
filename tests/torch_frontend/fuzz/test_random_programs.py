"""Random training programs, each run with a plain optimizer and with release: equal in every bit, or refused in time.

A failing program is shrunk and printed. Its fault belongs into the test of the law that it breaks.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.support.random_programs import Program, programs
from tests.support.rows import rows

PROGRAMS = 100  # a row
SEEDS = rows(range(60), range(3).__contains__)


def run_many(count: int, number: int, *, rough: bool) -> list[tuple[Program, list[str]]]:
    """Run programs that are drawn with this seed; return them with what was refused."""
    found: list[tuple[Program, list[str]]] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(rough))
    def run(program: Program) -> None:
        twins = program.run()
        assert rough or not program.must_work or not twins.refusals, f"refused: {twins.refusals[0]}"
        found.append((program, twins.refusals))

    run()
    return found


@pytest.mark.parametrize("number", SEEDS)
def test_a_loop_is_equal_in_every_bit(number: int) -> None:
    """Whatever is done between its steps, and never refused where a gradient comes whole."""
    found = run_many(PROGRAMS // 2, number, rough=False)
    assert sum(not refusals for _, refusals in found) > len(found) // 2


@pytest.mark.parametrize("number", SEEDS)
def test_an_interrupted_loop_is_equal_in_every_bit_or_refused_in_time(number: int) -> None:
    found = run_many(PROGRAMS, number, rough=True)
    assert sum(not refusals for _, refusals in found) > len(found) // 3
    assert sum(bool(refusals) for _, refusals in found) > len(found) // 20
