"""The page holds every cell exactly once."""

from __future__ import annotations

import itertools

from penstock.core.combinations import AXES, Combination, table, verdict
from penstock.core.combinations_page import boxes, markdown


def test_the_boxes_hold_every_cell_once_and_are_few() -> None:
    visited = []
    for found, members in boxes().items():
        for box in members:
            for values in itertools.product(*box):
                combination = Combination(**dict(zip(AXES, values, strict=True)))
                assert verdict(combination) == found
                visited.append(combination)
    assert len(visited) == len(set(visited)) == len(list(table()))
    assert sum(map(len, boxes().values())) < len(visited) / 10


def test_every_reason_is_on_the_page() -> None:
    page = markdown()
    for _, found in table():
        assert found.why in page
