"""The rules, one in each file; frontends, tests and the parity suite run over all rows of `RULES`."""

from types import MappingProxyType
from typing import Any

from ..errors import InvalidArgumentError
from .adam import ADAM
from .adamw import ADAMW
from .adan import ADAN
from .lion import LION
from .muon import MUON, MUON_MOMENTUM
from .radam import RADAM, RADAMW
from .ranger import RANGER, RANGER_L2
from .rule import Entered, Field, Fields, Rule
from .sgd import ROWS_OF_SGD, SGD
from .stable_adamw import STABLE_ADAMW

_ROWS = (STABLE_ADAMW, ADAMW, ADAM, LION, *ROWS_OF_SGD, RADAM, RADAMW, ADAN, MUON, MUON_MOMENTUM, RANGER, RANGER_L2)
RULES = MappingProxyType({rule.name: rule for rule in _ROWS})

__all__ = [
    "ADAM",
    "ADAMW",
    "ADAN",
    "LION",
    "MUON",
    "RADAM",
    "RANGER",
    "RULES",
    "SGD",
    "STABLE_ADAMW",
    "Entered",
    "Field",
    "Fields",
    "Rule",
    "check_rule",
]


def check_rule(rule: Any) -> None:
    """Raise `InvalidArgumentError` unless the rule is known."""
    if not isinstance(rule, str) or rule not in RULES:
        raise InvalidArgumentError(f"rule={rule!r} is not known; it must be one of {', '.join(RULES)}.")
