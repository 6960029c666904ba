"""The rules of the suite: all of `core.rules` that it can follow, and by name those that it cannot, with the reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..core import rules
from ..core.hyperparameters import DECAY, Hyperparameters
from ..core.reference import RAW, Gradient, Reference, ReferenceTensor, Settings
from ..core.rules import Entered, Rule, adam_family, muon
from .matrices import orthogonalised
from .tracked import Namespace, NotCoveredError

EXACT = {"ns_dtype": "float32"}
"""Settings in place of defaults for which a bound would be larger than what it bounds."""


def hyperparameters_of(rule: Rule, learning_rate: float, weight_decay: float, **more: Any) -> Hyperparameters:
    """The rule's defaults with another learning rate and decay, and `EXACT`."""
    exact = {name: value for name, value in EXACT.items() if name in rule.defaults}
    given = {**rule.defaults, **exact, "learning_rate": learning_rate, "weight_decay": weight_decay, **more}
    return rule.hyperparameters(**given)


def decays_of(given: Hyperparameters) -> dict[str, float]:
    """The decays of running means among hyperparameters, by name, in their order; those that are 0 are left out."""
    found = {name: getattr(given, name) for name, allowed in given.RANGES.items() if allowed is DECAY}
    return {name: decay for name, decay in found.items() if decay != 0.0}


@functools.lru_cache(maxsize=8)
def corrections(rule: Rule, given: Hyperparameters, step: int, dtype: str) -> Any:
    """The scalars of `Rule.corrections`, as far off as a device has them that computes them by itself in this dtype."""
    xp = Namespace(dtype)
    own: dict[str, Any] = {
        name: xp.tracked(getattr(given, name)) for name in rule.own_hyperparameters if name in rule.hyperparameters.RANGES
    }
    found = rule.corrections(dataclasses.replace(given, **own), xp.tracked(float(step)), xp)
    return type(found)(*map(xp.stored, found))


def settings_of(rule: Rule, given: Hyperparameters, accumulation: str | None = None) -> Settings:
    """The reference's settings for the hyperparameters of a rule."""
    known = {field.name for field in dataclasses.fields(Settings)}
    same = {name: value for name, value in vars(given).items() if name in known}
    betas = tuple(getattr(given, name) for name in rule.own_hyperparameters if name.startswith("beta"))
    return Settings(
        **{"eps": 0.0, **same, "rule": rule.name, "lr": given.learning_rate, "betas": betas, "accumulation": accumulation}
    )


def held_by(rule: Rule, given: Hyperparameters, tensor: ReferenceTensor, step: int | None = None) -> dict[str, np.ndarray]:
    """What the reference holds: the parameter, and the rule's fields as backends keep them.

    Args:
        step: the number of the update for which fields are debiased; None: of the last one.
    """
    count = tensor.t if step is None else step
    found = {"parameter": tensor.parameter}
    for field, beta in zip(rule.fields, rule.decays(given), strict=True):
        raw = getattr(tensor, RAW[field.name])
        value = np.zeros_like(tensor.parameter) + (0.0 if raw is None else raw)
        found[field.name] = value if beta is None or count == 0 else value / (1.0 - beta**count)
    return found


def why_not(rule: Rule) -> str | None:
    """Return why the suite cannot follow a rule: what tracked arrays cannot do, or a step that is not the reference's."""
    if rule.mean_square not in (None, adam_family.mean_square):
        return "its step is divided by a mean that no bound is derived for."
    if rule.of_matrix not in (None, muon.orthogonalised):
        return "its step is of a whole matrix, and no bound is derived for it."
    missing = [field.name for field in rule.fields if field.name not in RAW]
    if missing:
        return f"the reference has no {missing[0]}."
    shape = (2,) if rule.of_matrix is None else (2, 3)
    given, gradients = hyperparameters_of(rule, 0.1, 0.1), np.random.default_rng(0).normal(size=(_TRIED, *shape))
    try:
        reference, xp = Reference(settings_of(rule, given), {"p": np.ones(shape)}), Namespace("float64")
        for step, gradient in enumerate(gradients, 1):
            before = held_by(rule, given, reference.tensors["p"])
            reference.run(Gradient("p", gradient))
            fields = tuple(xp.tracked(before[field.name]) for field in rule.fields)
            entering = xp.tracked(gradient + given.weight_decay * before["parameter"] if rule.l2 else gradient)
            scalars = corrections(rule, given, step, "float64")
            with np.errstate(over="ignore"):  # of a selection's other side
                after = rule.accumulate(given, scalars, fields, entering, xp, first=True)
            direction = rule.direction(given, scalars, after, Entered(fields, entering), xp)
            if rule.of_matrix is not None:
                direction = orthogonalised(xp, given, direction)
            whole = direction.value + (0.0 if rule.l2 else given.decay_rate) * before["parameter"]
            added = xp.tracked(-(rule.step_size(given) * whole))
            if rule.after_step is not None:
                after, added = rule.after_step(scalars, after, added)
            expected = held_by(rule, given, reference.tensors["p"])
            moved = before["parameter"] + added.value
            values = [each.value for each in after]
            if rule.mean_square is None:
                values.append(moved)
            names = [*(field.name for field in rule.fields), "parameter"]
            for name, value in zip(names, values, strict=False):
                if not np.allclose(value, expected[name], rtol=1e-6, atol=1e-9):
                    return f"{name} is not what the reference has after {step} updates: a step does more than its functions."
    except NotCoveredError as why:
        return str(why)
    except Exception as error:
        return f"its functions cannot be followed: {type(error).__name__}: {error}"
    return None


_TRIED = 7
"""Updates that are followed to find out: what happens every few steps (a lookahead) is seen, too."""

_REASONS = {name: why_not(rule) for name, rule in rules.RULES.items()}

RULES: Mapping[str, Rule] = MappingProxyType({name: rules.RULES[name] for name, why in _REASONS.items() if why is None})

FAMILY: Mapping[str, Rule] = MappingProxyType({name: rule for name, rule in RULES.items() if adam_family.is_member(rule)})
"""Adam and its relatives, which have every case; of the others there are fewer (`cases.is_taken`)."""

OTHERS = tuple(rule for name, rule in RULES.items() if name not in FAMILY and rule.of_matrix is None)
"""The others, those that take tensors of any shape."""


def rules_and_dtypes(dtypes: Sequence[str]) -> list[tuple[Rule, str]]:
    """Return what a section has that takes tensors of any shape: Adam and its relatives in every dtype, `OTHERS` in float32."""
    found = {dtype: [*FAMILY.values(), *(OTHERS if dtype == "float32" else ())] for dtype in dtypes}
    return [(rule, dtype) for dtype, of_dtype in found.items() for rule in of_dtype]


NOT_COVERED: Mapping[str, str] = MappingProxyType({f"rule {name}": why for name, why in _REASONS.items() if why is not None})
"""The rules of penstock that the suite does not compare, and why; a report names them."""
