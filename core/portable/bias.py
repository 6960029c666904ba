r"""Conversion of Adam's moments between other libraries' biased form and the portable state's debiased one.

torch.optim and optax keep *biased* means, m' = beta*m' + (1-beta)*g, and divide by 1-beta^t at each use; the portable state
holds what they divide to:

    m = m' / (1-beta1^t)        v = v' / (1-beta2^t)        1-beta^t = -expm1(t*log(beta))

A file of this package says under which betas its moments are debiased: those of the parameter's group. Where the optimizer
that reads it has others, m*(1-b^t)/(1-b'^t) is debiased under its own, so that the biased means stay what they were.

Either way is computed in float64 and rounded to the dtype in which it is kept. So it is exact up to that rounding, half a
spacing, and not bit for bit: there and back may differ in the last place.

Source: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980, algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..array_ops import numpy_dtype, numpy_ops
from ..debiasing import one_minus_power
from ..errors import InvalidArgumentError
from ..rules import Rule
from ..update import rebiased
from .state import ParameterState, PortableState, Settings, scale_name

Decays = tuple[float | None, ...]
"""The beta that each field of a rule is debiased by; None for one that is not."""

Fields = Mapping[str, np.ndarray]
"""The fields of a rule by name, in its order."""


def bias_correction(beta: float | None, step: int) -> float:
    """Return 1 - beta^t; 1 before the first update, when there is nothing to correct, and for a field that is not debiased.

    Args:
        beta: in [0, 1), or None.
        step: t, the number of updates so far.
    """
    return one_minus_power(beta, step, np) if step > 0 and beta is not None else 1.0


def without_bias(biased: Fields, decays: Decays, step: int, dtypes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the debiased fields of biased ones.

    Args:
        biased: arrays of one shape, any floating-point dtype.
        decays: those of the optimizer.
        step: of the parameter.
        dtypes: of the result.
    """
    return {
        name: (array.astype(np.float64) / bias_correction(beta, step)).astype(numpy_dtype(dtype))
        for (name, array), beta, dtype in zip(biased.items(), decays, dtypes, strict=True)
    }


def with_bias(
    rule: Rule, name: str, debiased: Fields, decays: Decays, step: int, dtypes: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the biased fields of debiased ones; arguments as for `without_bias`.

    Raises:
        InvalidArgumentError: `dtypes` cannot hold them; the text has the parameter's `name`.
    """
    rounded = {}
    for field, beta, dtype in zip(rule.fields, decays, dtypes, strict=True):
        wide = debiased[field.name].astype(np.float64) * bias_correction(beta, step)
        with np.errstate(over="ignore"):
            kept = wide.astype(numpy_dtype(dtype))
        # Below float32's range a second moment is far below any eps; in float16 it is not, and m/(0+eps) would explode.
        lost = dtype == "float16" and field.of_squares and bool(((kept == 0) & (wide != 0)).any())
        if lost or not np.isfinite(kept).all():
            raise InvalidArgumentError(
                f"{field.name} of {name!r} does not fit into {dtype}, in which the optimizer keeps it; use float32 parameters."
            )
        rounded[field.name] = kept
    return rounded


def under_decays(fields: Fields, step: int, before: Decays, after: Decays) -> dict[str, np.ndarray]:
    """Return fields, debiased by `before`, as debiased by `after`; bit for bit where these are equal."""
    found = dict(fields)
    names = [name for name in fields if name not in set(map(scale_name, fields))]
    for name, old, new in zip(names, before, after, strict=True):
        carrier = scale_name(name) if scale_name(name) in fields else name  # scales carry the factor
        if old is not None:
            found[carrier] = rebiased(numpy_ops, fields[carrier], step, old, new)
    return found


def decays_in(state: PortableState, name: str) -> Decays | None:
    """Return the betas that the fields of a parameter are debiased by; None where its group does not tell one of them."""
    (group,) = (group.hyperparameters for group in state.groups if name in group.parameters)
    return decays_of(state.rules[name], group)


def decays_of(rule: Rule, hyperparameters: Settings) -> Decays | None:
    """Return the betas that the fields of a rule are debiased by; None where the hyperparameters lack one of them."""
    found: Any = tuple(None if field.beta is None else hyperparameters.get(field.beta) for field in rule.fields)
    missing = any(beta is None and field.beta is not None for beta, field in zip(found, rule.fields, strict=True))
    return None if missing else found


def for_decays(entry: ParameterState, before: Decays | None, after: Decays | None) -> ParameterState:
    """Return an entry with its fields, debiased by `before`, as debiased by `after`; unknown betas are the other's."""
    if before is None or after is None:
        return entry
    return dataclasses.replace(entry, fields=under_decays(entry.fields, entry.step, before, after))
