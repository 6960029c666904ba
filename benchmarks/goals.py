"""Goals beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table


class Goal(NamedTuple):
    """`what` is to be at most `at_most`; `measured` is None where a row that it needs was not measured."""

    what: str
    at_most: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether it holds; None if that was not measured."""
        return None if self.measured is None else self.measured <= self.at_most

    def as_json(self) -> dict[str, Any]:
        """The goal as an object for a result file."""
        return {**self._asdict(), "met": self.met}


def ratio(value: float | None, over: float | None) -> float | None:
    """value / over, or None where one of them was not measured."""
    return None if value is None or over is None else value / over


def goals_table(goals: Sequence[Goal], title: str) -> Table:
    """One line a goal: "goal 0.85, measured 2.1"."""
    table = Table("what", "goal", "measured", "met", title=title)
    for goal in goals:
        measured = "-" if goal.measured is None else f"{goal.measured:.2f}"
        table.add_row(
            goal.what, f"goal {goal.at_most:g}", f"measured {measured}", {None: "-", True: "yes", False: "no"}[goal.met]
        )
    return table
