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

import numpy as np

from ..array_ops import numpy_dtype, numpy_ops
from ..dtypes import StateDtypes
from ..errors import InvalidArgumentError
from ..moments import Moments, one_minus_power
from ..update import rebiased
from .state import ParameterState, PortableState

Betas = tuple[float, float]


def bias_correction(beta: float, step: int) -> float:
    """Return 1 - beta^t; 1 before the first update, when there is nothing to correct.

    Args:
        beta: in [0, 1).
        step: t, the number of updates so far.
    """
    return one_minus_power(beta, step, np) if step > 0 else 1.0


def without_bias(biased: Moments, betas: Betas, step: int, dtypes: StateDtypes) -> Moments:
    """Return the debiased moments of biased ones.

    Args:
        biased: arrays of one shape, any floating-point dtype.
        betas: those of the optimizer.
        step: of the parameter.
        dtypes: of the result.
    """
    wide = [moment.astype(np.float64) / bias_correction(beta, step) for moment, beta in zip(biased, betas, strict=True)]
    return Moments(*(x.astype(numpy_dtype(dtype)) for x, dtype in zip(wide, dtypes, strict=True)))


def with_bias(name: str, debiased: Moments, betas: Betas, step: int, dtypes: StateDtypes) -> Moments:
    """Return the biased moments of debiased ones; arguments as for `without_bias`.

    Raises:
        InvalidArgumentError: `dtypes` cannot hold them; the text has the parameter's `name`.
    """
    rounded = []
    for field, moment, beta, dtype in zip(Moments._fields, debiased, betas, dtypes, strict=True):
        wide = moment.astype(np.float64) * bias_correction(beta, step)
        with np.errstate(over="ignore"):
            kept = wide.astype(numpy_dtype(dtype))
        # Below float32's range a second moment is far below any eps; in float16 it is not, and m/(0+eps) would explode.
        lost = dtype == "float16" and field == "exp_avg_sq" and bool(((kept == 0) & (wide != 0)).any())
        if lost or not np.isfinite(kept).all():
            raise InvalidArgumentError(
                f"{field} of {name!r} does not fit into {dtype}, in which the optimizer keeps it; use float32 parameters."
            )
        rounded.append(kept)
    return Moments(*rounded)


def under_betas(moments: Moments, step: int, before: Betas, after: Betas) -> Moments:
    """Return moments, debiased under the betas `before`, as debiased under `after`; bit for bit if these are equal."""
    pairs = zip(moments, before, after, strict=True)
    return Moments(*(rebiased(numpy_ops, moment, step, old, new) for moment, old, new in pairs))


def betas_of(state: PortableState, name: str) -> Betas | None:
    """Return the betas under which the moments of a parameter are debiased; None where its group does not tell."""
    (group,) = (group.hyperparameters for group in state.groups if name in group.parameters)
    beta1, beta2 = group.get("beta1"), group.get("beta2")
    return None if beta1 is None or beta2 is None else (beta1, beta2)


def for_betas(entry: ParameterState, before: Betas | None, after: Betas | None) -> ParameterState:
    """Return an entry with its moments, debiased under `before`, as debiased under `after`; unknown betas are the other's."""
    if before is None or after is None:
        return entry
    moments = under_betas(Moments(entry.exp_avg, entry.exp_avg_sq), entry.step, before, after)
    return dataclasses.replace(entry, **moments._asdict())
