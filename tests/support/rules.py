"""The rules that keep Adam's moments."""

from penstock.core.rules import RULES, adam_family

ADAM_FAMILY = {name: rule for name, rule in RULES.items() if adam_family.is_member(rule)}
