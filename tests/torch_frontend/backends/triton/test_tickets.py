"""Every interleaving of a few programs over real tables keeps the protocol's promises; each planted fault breaks one."""

from __future__ import annotations

import pytest
from tests.support.ticket_model import LEAVE_STEPS, MEASURE_STEPS, WRITE_STEPS, Broken, Machine

from penstock.torch_frontend.backends.triton import work

TABLES = [([1], 9), ([3], 9), ([2, 1], 9), ([2, 1], 1), ([1, 2], 1), ([1, 1, 1], 1)]
"""Items of each tensor, and of a wave."""


def table(counts: list[int], wave: int) -> list[tuple[int, ...]]:
    """As a launch gets it; an item has one element here."""
    return [tuple(row) for row in work.tickets(counts, 1, wave).tolist()]


@pytest.mark.parametrize(("counts", "wave"), TABLES, ids=str)
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_every_run_does_every_item_once_and_in_time(counts: list[int], wave: int, programs: int) -> None:
    """With any number of programs resident: none waits for one that has not started."""
    for resident in range(1, min(programs, 2) + 1):
        assert Machine(table(counts, wave), programs, resident).check() > 2 * len(counts)


def test_three_resident_programs_keep_the_protocol() -> None:
    assert Machine(table([1, 1], 1), 3).check() > 1000
    assert Machine(table([2], 9), 3).check() > 1000


def without(steps: tuple[str, ...], at: int) -> tuple[str, ...]:
    return steps[:at] + steps[at + 1 :]


def swapped(steps: tuple[str, ...], one: str, other: str) -> tuple[str, ...]:
    exchange = {one: other, other: one}
    return tuple(exchange.get(step, step) for step in steps)


def barriers(steps: tuple[str, ...]) -> list[int]:
    return [at for at, step in enumerate(steps) if step == "barrier"]


TWO = table([2, 1], 9)
FAULTS = {
    "the table backward": ({"table": TWO[::-1]}, "deadlock"),
    "an item twice": ({"table": [*TWO, TWO[-1]]}, "done twice"),
    "a write before the last measure": ({"table": [TWO[0], TWO[3], *TWO[1:3], *TWO[4:]], "resident": 1}, "deadlock"),
    "announced before the square": ({"measure": swapped(MEASURE_STEPS, "square", "announce")}, "without the mean square"),
    "arrived before the partial sum": ({"measure": swapped(MEASURE_STEPS, "store", "arrive")}, "sum of tensor"),
    "the sum before arriving": ({"measure": swapped(MEASURE_STEPS, "arrive", "sum")}, "sum of tensor"),
    "no waiting": ({"write": WRITE_STEPS[1:]}, "without the mean square"),
    "reset before all have left": ({"leave": ("reset", "leave")}, "reset while a program is at work|not zero"),
    "no reset": ({"leave": LEAVE_STEPS[:-1]}, "not zero"),
    "arrivals not reset": (
        {"measure": without(MEASURE_STEPS, MEASURE_STEPS.index("reset_arrived"))},
        "not zero",
    ),
    "arriving without release": ({"orders": {"arrive": "acquire"}}, "sum of tensor"),
    "arriving without acquire": ({"orders": {"arrive": "release"}}, "sum of tensor"),
    "announcing without release": ({"orders": {"announce": "relaxed"}}, "without the mean square"),
    "waiting without acquire": ({"orders": {"wait": "relaxed"}}, "without the mean square"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_protocol_is_found(name: str) -> None:
    changes, message = FAULTS[name]
    with pytest.raises(Broken, match=message):
        Machine(**({"table": TWO, "programs": 2} | changes)).check()


@pytest.mark.parametrize(
    ("phase", "steps", "at"),
    [("measure", MEASURE_STEPS, at) for at in barriers(MEASURE_STEPS)] + [("write", WRITE_STEPS, barriers(WRITE_STEPS)[0])],
)
def test_every_barrier_is_needed(phase: str, steps: tuple[str, ...], at: int) -> None:
    """One thread counts, all others read: without a barrier either sees what the other does not."""
    with pytest.raises(Broken, match=r"the sum of|mean square|measured"):
        Machine(TWO, 2, **{phase: without(steps, at)}).check()
