"""The rules that keep Adam's moments."""

import dataclasses
from typing import Any

from penstock.core.reference import Settings
from penstock.core.rules import RULES, Rule, adam_family

ADAM_FAMILY = {name: rule for name, rule in RULES.items() if adam_family.is_member(rule)}


def reference_settings(rule: Rule, learning_rate: float, **changed: Any) -> Settings:
    """The defaults of a rule for the reference, but for some changes."""
    own = {field.name for field in dataclasses.fields(Settings)} & rule.defaults.keys()
    values = {"eps": 0.0, **{name: rule.defaults[name] for name in own}, **changed}
    return Settings(rule.name, learning_rate, rule.betas, **values)
