"""The rules of the suite: those whose rounding errors `propagation` derives."""

from types import MappingProxyType

from ..core import rules
from ..core.rules import adam_family

RULES = MappingProxyType({name: rule for name, rule in rules.RULES.items() if adam_family.is_member(rule)})
