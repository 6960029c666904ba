"""Betas that change (OneCycleLR, CyclicLR): a group's moments are expressed under the new ones before the next update.

The moments are stored debiased. The group keeps the betas that they are debiased under, so that a state_dict has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.debiasing import debiasing_ratio
from ..core.errors import RefusedError
from ..core.hyperparameters import Scalar
from ..core.update import rebiased
from .array_ops import torch_ops
from .backends.backend import scale_key, state_keys
from .communication.shards import local
from .groups import Group, hyperparameters, rule_of

BETAS_OF_MOMENTS = "betas_of_moments"
"""The key of a group for the betas that its moments are debiased under: two numbers, or copies of tensors on a device."""


def decays_of(group: Group) -> tuple[Scalar | None, ...]:
    """Return the beta that each field of the rule is debiased by now: numbers, or 0-d tensors on a device."""
    return rule_of(group).decays(hyperparameters(group))


def set_betas_of_moments(group: Group, betas: Sequence[Scalar | None]) -> None:
    """Record that the group's moments are debiased under these betas. Tensors stay the same: a CUDA graph may read them."""
    kept = group.get(BETAS_OF_MOMENTS, (None,) * len(betas))
    group[BETAS_OF_MOMENTS] = tuple(_copied(old, new) for old, new in zip(kept, betas, strict=True))


def _copied(old: Any, new: Scalar) -> Scalar:
    if not isinstance(new, Tensor):
        return new
    return old.copy_(new) if isinstance(old, Tensor) else new.detach().clone()


def default_betas_of_moments(group: Group) -> None:
    """For a group without the record, as it was saved by earlier versions: its moments are debiased under its own betas."""
    if BETAS_OF_MOMENTS not in group:
        set_betas_of_moments(group, decays_of(group))


def check_between_updates(group: Group, number: int, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raise `RefusedError` if micro-batches are in the moments, with which the old betas have entered the update."""
    if any("mean_square" in states.get(parameter, ()) for parameter in group["params"]):
        raise RefusedError(
            f"betas of parameter group {number} changed between the micro-batches of one update, of which some are in the "
            f"moments already. Set betas={group[BETAS_OF_MOMENTS]} again to go on, and change them after optimizer.step()."
        )


def follow_betas(group: Group, betas: Sequence[Scalar | None], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Express the moments of a group under its present betas, in place: `core.update.rebiased`.

    Betas or step counts that are on a device are not read.

    Args:
        group: its `check_between_updates` has passed.
        betas: validated, as `Rule.decays` returns them.
        states: of the parameters, by parameter.
    """
    before = group[BETAS_OF_MOMENTS]
    with torch.no_grad():
        for state in filter(None, map(states.get, group["params"])):
            step = local(state["step"]) if group["capturable"] else float(state["step"])
            for key, old, new in zip(state_keys(rule_of(group)), before, betas, strict=True):
                if new is None:
                    continue
                moment = local(state[scale_key(key) if scale_key(key) in state else key])  # scales carry the factor
                if any(isinstance(number, Tensor) for number in (step, old, new)):
                    moment.copy_(rebiased(torch_ops, moment, step, old, new))
                elif (ratio := debiasing_ratio(old, new, step, torch)) != 1:
                    moment.mul_(ratio)  # the product of `rebiased` in place; torch._foreach_mul_ would round the ratio first
        set_betas_of_moments(group, betas)
