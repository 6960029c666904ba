"""Rows of parameters, of which `make test` visits some and `make test-all` every one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def rows(given: Iterable[Any], always: Callable[[Any], bool]) -> list[Any]:
    """Mark the rows as exhaustive that are not visited always. A row is a tuple, or the value of a single parameter."""
    found = []
    for row in given:
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, marks=() if always(row) else pytest.mark.exhaustive))
    return found


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the values of some axes; as many are visited always as every value of every axis needs."""
    longest = max(map(len, axes))
    diagonal = {tuple(at % len(axis) for axis in axes) for at in range(longest)}
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    marks = [() if place in diagonal else pytest.mark.exhaustive for place in places]
    flat = [[axis[at] for axis, at in zip(axes, place, strict=True)] for place in places]
    values = [tuple(itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in row)) for row in flat]
    return [pytest.param(*row, marks=mark) for row, mark in zip(values, marks, strict=True)]
