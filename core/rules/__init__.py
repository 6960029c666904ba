"""The rules, one per file; each row of `RULES` inherits every law in the tests and every case of the parity suite."""

from types import MappingProxyType

from .adam import ADAM
from .adamw import ADAMW
from .rule import Rule
from .stable_adamw import STABLE_ADAMW

RULES = MappingProxyType({rule.name: rule for rule in (STABLE_ADAMW, ADAMW, ADAM)})

__all__ = ["ADAM", "ADAMW", "RULES", "STABLE_ADAMW", "Rule"]
