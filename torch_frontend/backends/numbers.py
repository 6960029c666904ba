"""The scalars of an update: a group's hyperparameters and bias-correction factors as 0-d tensors, cached per group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.hyperparameters import Hyperparameters, Scalar, is_zero
from ...core.rules import Rule

CACHE_SIZE = 96
"""Entries that a group caches: up to three for each number of updates. Tensors updated equally often share theirs."""


class UpdateNumbers(NamedTuple):
    """The scalars of one update as 0-d tensors in the compute dtype.

    They are on the CPU, where operations on every device read them as scalars, or on the device of a tensor hyperparameter.
    (torch converts a Python number to a tensor at each use, which costs as much as an operation on a small tensor.)

    corrections: the rule's.
    eps: None for a rule without one.
    decay: the factor of the parameter in the step; None if it is zero, or if the decay is part of the gradient (L2).
    plain: the gradient enters the fields unchanged, and no decay is zero; true of most updates.
    """

    corrections: tuple[Tensor, ...]
    eps: Tensor | None
    decay: Tensor | None
    step_size: Tensor
    plain: bool


def numbers_of(current: Hyperparameters, rule: Rule, corrections: Any, dtype: torch.dtype) -> UpdateNumbers:
    """Return the scalars of an update with these hyperparameters."""

    def tensor(value: Scalar) -> Tensor:
        return _scalar(value, dtype)

    decay = 0.0 if rule.l2 else current.decay_rate
    return UpdateNumbers(
        tuple(map(tensor, corrections)),
        tensor(eps) if (eps := getattr(current, "eps", None)) is not None else None,
        None if is_zero(decay) else tensor(decay),
        tensor(rule.step_size(current)),
        not (current.maximize or rule.l2 or any(map(is_zero, rule.decays(current)))),
    )


def _scalar(value: Scalar, dtype: torch.dtype) -> Tensor:
    """Return a 0-d tensor: of a number on the CPU, whatever torch's default device is."""
    return value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu")


class GroupSettings:
    """The current hyperparameters of a parameter group and what follows from them; all slots of the group share it."""

    def __init__(self, rule: Rule, current: Hyperparameters) -> None:
        self.rule = rule
        self.hyperparameters = current
        self._cache: dict[Any, Any] = {}

    def change(self, current: Hyperparameters) -> None:
        """Replace the hyperparameters."""
        self.hyperparameters = current
        self._cache.clear()

    def derived(self, function: Callable[[Hyperparameters], Any]) -> Any:
        """Return `function(hyperparameters)`, computed again only when they change."""
        found = self._cache.get(function)
        if found is None:
            found = self._cache[function] = function(self.hyperparameters)
        return found

    def corrections(self, step: float) -> Any:
        """Return the rule's corrections of update number `step`, which starts at 1."""
        found = self._cache.get(step)
        if found is None:
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            found = self._cache[step] = self.rule.corrections(self.hyperparameters, step, torch)
        return found

    def numbers(self, step: float, dtype: torch.dtype) -> UpdateNumbers:
        """Return the scalars of update number `step`, which starts at 1."""
        found: UpdateNumbers | None = self._cache.get((step, dtype))
        if found is None:
            found = numbers_of(self.hyperparameters, self.rule, self.corrections(step), dtype)
            self._cache[step, dtype] = found
        return found

    def vector(self, step: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `vector_of` the scalars of update number `step`, which starts at 1."""
        found: Tensor | None = self._cache.get((step, dtype, device))
        if found is None:
            found = vector_of(self.hyperparameters, self.rule, self.numbers(step, dtype), device)
            self._cache[step, dtype, device] = found
        return found


def vector_of(current: Hyperparameters, rule: Rule, numbers: UpdateNumbers, device: torch.device) -> Tensor:
    """Return the corrections, the learning rate and the decay as one tensor, 1-d. The decay is that of the step, or of L2."""
    decay: Any = numbers.decay
    if decay is None:
        decay = _scalar(current.weight_decay if rule.l2 else 0.0, numbers.step_size.dtype)
    learning_rate = _scalar(current.learning_rate, numbers.step_size.dtype)
    together = [*numbers.corrections, learning_rate, decay]
    return torch.stack([number.to(device, non_blocking=True) for number in together])
