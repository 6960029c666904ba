"""The numbers of an update: the hyperparameters of a group, and the 0-d tensors that they become."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.hyperparameters import Hyperparameters, Scalar
from ...core.moments import Corrections, bias_corrections, is_zero
from ...core.rules import Rule

KEPT = 32
"""Numbers of different updates that a group keeps: tensors that were updated equally often share theirs."""


class UpdateNumbers(NamedTuple):
    """The numbers of one update as 0-d tensors in the compute dtype.

    They are on the CPU, where every device reads them as scalars, or where the hyperparameter is. (A Python number would be
    made a tensor at each use, which costs as much again as the operation on a small tensor.)

    first, second: c1 and c2, the bias-corrected 1 - beta.
    decay: what the step multiplies the parameter by; None where it is zero, or enters the gradient.
    plain: the gradient enters the moments as it is, and no beta is zero, as in most updates.
    """

    first: Tensor
    second: Tensor
    eps: Tensor
    decay: Tensor | None
    learning_rate: Tensor
    plain: bool


def numbers_of(current: Hyperparameters, rule: Rule, corrections: Corrections, dtype: torch.dtype) -> UpdateNumbers:
    """The numbers of an update with these hyperparameters."""

    def tensor(value: Scalar) -> Tensor:
        return torch.as_tensor(value, dtype=dtype)

    decay = 0.0 if rule.l2 else current.decay_rate
    return UpdateNumbers(
        tensor(corrections.first),
        tensor(corrections.second),
        tensor(current.eps),
        None if is_zero(decay) else tensor(decay),
        tensor(current.learning_rate),
        not (current.maximize or rule.l2 or is_zero(current.beta1) or is_zero(current.beta2)),
    )


class GroupSettings:
    """The hyperparameters of a parameter group as they are now: one object a group, which all its slots share."""

    def __init__(self, current: Hyperparameters) -> None:
        self.hyperparameters = current
        self._numbers: dict[Any, UpdateNumbers] = {}
        self._complements: dict[float, Corrections] = {}
        self._vectors: dict[Any, Tensor] = {}

    def change(self, current: Hyperparameters) -> None:
        """Take other hyperparameters from now on."""
        self.hyperparameters = current
        self._numbers.clear()
        self._complements.clear()
        self._vectors.clear()

    def corrections(self, step: float) -> Corrections:
        """c1 and c2 of update number `step`, from 1 on."""
        found = self._complements.get(step)
        if found is None:
            if len(self._complements) >= KEPT:
                self._complements.clear()
            found = self._complements[step] = bias_corrections(self.hyperparameters, step, torch)
        return found

    def numbers(self, rule: Rule, step: float, dtype: torch.dtype) -> UpdateNumbers:
        """The numbers of update number `step`, from 1 on."""
        found = self._numbers.get((step, dtype))
        if found is None:
            if len(self._numbers) >= KEPT:
                self._numbers.clear()
            found = self._numbers[step, dtype] = numbers_of(self.hyperparameters, rule, self.corrections(step), dtype)
        return found

    def vector(self, rule: Rule, step: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`vector_of` the numbers of update number `step`, from 1 on."""
        found = self._vectors.get((step, dtype, device))
        if found is None:
            if len(self._vectors) >= KEPT:
                self._vectors.clear()
            numbers = self.numbers(rule, step, dtype)
            found = self._vectors[step, dtype, device] = vector_of(self.hyperparameters, rule, numbers, device)
        return found


def vector_of(current: Hyperparameters, rule: Rule, numbers: UpdateNumbers, device: torch.device) -> Tensor:
    """c1, c2, the learning rate and the decay as one tensor, [4]. The decay is that of the rule: of the step, or L2."""
    decay: Any = numbers.decay
    if decay is None:
        decay = torch.as_tensor(current.weight_decay if rule.l2 else 0.0, dtype=numbers.first.dtype)
    together = [numbers.first, numbers.second, numbers.learning_rate, decay]
    return torch.stack([number.to(device, non_blocking=True) for number in together])
