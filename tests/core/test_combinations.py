"""The table of combinations says something of every cell, and of a refused one what to do instead."""

from __future__ import annotations

import math

import pytest

from penstock.core.combinations import AXES, CLAUSES, Combination, Kind, require, table, verdict
from penstock.core.errors import RefusedError


def test_every_cell_has_a_verdict_and_every_clause_a_cell() -> None:
    cells = list(table())
    assert len(cells) == math.prod(len(values) for values in AXES.values())
    used = {id(found) for _, found in cells}
    assert used == {id(clause.verdict) for clause in CLAUSES}  # a clause that no cell reaches is dead
    assert {found.kind for _, found in cells} == set(Kind)


def test_a_refusal_names_the_remedy_and_require_raises_it() -> None:
    for combination, found in table():
        if found.kind is Kind.REFUSED:
            assert "use " in found.why
            with pytest.raises(RefusedError) as raised:
                require(combination)
            assert str(raised.value) == found.why
        else:
            assert require(combination) == found


def test_modes_that_need_the_whole_gradient_refuse_in_state_accumulation() -> None:
    assert verdict(Combination(clipping="global_norm", accumulation="state")).kind is Kind.REFUSED
    assert verdict(Combination(loss_scaling="dynamic", accumulation="state")).kind is Kind.REFUSED
    assert verdict(Combination(accumulation="state")).kind is Kind.APPROXIMATE
    assert verdict(Combination()).kind is Kind.EXACT


def test_an_unknown_value_is_no_cell() -> None:
    with pytest.raises(ValueError, match="accumulation='sum'"):
        Combination(accumulation="sum")
