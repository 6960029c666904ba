"""Which rules the suite covers, and that it names what it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.core import rules
from penstock.core.rules import adam_family
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.rules import FAMILY, NOT_COVERED, RULES, why_not
from penstock.parity.sections import SECTIONS


def test_every_rule_is_covered_or_named() -> None:
    named = {name.removeprefix("rule ") for name in NOT_COVERED if name.startswith("rule ")}
    assert RULES.keys() | named == rules.RULES.keys()
    assert not RULES.keys() & named
    assert not NOT_COVERED
    assert FAMILY.keys() == {"stable_adamw", "adamw", "adam"}


def _of_a_matrix(current: Any, scalars: Any, fields: Any, entered: Any, xp: Any) -> Any:
    return xp.matmul(fields[0], fields[0])


def _jumps(current: Any, scalars: Any, fields: Any, entered: Any, xp: Any) -> Any:
    return 2.0 * adam_family.direction(current, scalars, fields, entered, xp)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"direction": _of_a_matrix}, "matmul"),
        ({"direction": _jumps}, "parameter is not what the reference has after 1 updates"),
        ({"fields": (*rules.ADAM.fields, rules.Field("slow"))}, "the reference has no slow"),
        ({"mean_square": lambda *_: 1.0}, "a mean that no bound is derived for"),
        ({"of_matrix": lambda ops, current, direction: direction}, "its step is of a whole matrix"),
        ({"after_step": lambda scalars, fields, added: (fields, 0.5 * added)}, "parameter is not what the reference has"),
    ],
)
def test_a_rule_that_cannot_be_followed_says_why(changed: dict[str, Any], why: str) -> None:
    assert why_not(rules.RULES["adamw"]) is None
    assert why in str(why_not(dataclasses.replace(rules.RULES["adamw"], **changed)))


def test_the_kernels_refuse_every_case_of_a_rule_that_they_do_not_have() -> None:
    """Where there is a GPU, they run all sections in the suite's own process, and what they cannot start is a broken row."""
    pytest.importorskip("torch")
    backend = TorchBackend("triton", "cuda")
    ask = {"updates": backend.refuses, "codings": backend.refuses_codings, "events": backend.refuses_events}
    ask |= {"marker": backend.refuses_markers, "trajectories": backend.refuses_trajectory}
    for section in SECTIONS:
        for case in section.cases(quick=True) if section.name in ask else ():
            rule = case.problem.rule if section.name == "updates" else case.rule
            assert (ask[section.name](case) is None) is (rule.name in FAMILY), case.name
