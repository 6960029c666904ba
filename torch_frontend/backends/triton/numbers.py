"""The scalars of a launch: as arguments where the host knows them, else in a small buffer on the device."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.hyperparameters import Hyperparameters
from ....core.moments import SMALLEST_NORMAL_FLOAT32, is_zero
from ..backend import TensorSlot
from .memory import REMEMBERED, Scratch


class Fixed(NamedTuple):
    """What of the hyperparameters is compiled in: whether beta1, and beta2, are known to be 0; the sign of the step."""

    zero1: bool
    zero2: bool
    maximize: bool


class Numbers(NamedTuple):
    """What the kernels call first1, log1, first2, log2, lr, eps, floor and decay.

    fixed: no number, but what is compiled in.
    buffer: all of them, in the compute dtype; None where `arguments` has them.
    arguments: float32 arguments of a launch. They are no part of what is compiled.
    """

    fixed: Fixed
    buffer: Tensor | None
    arguments: tuple[float, ...]


class KnownNumbers:
    """The numbers of slots. Those that are the same for all tensors of a group are computed once an update."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[Hyperparameters, Any, Numbers]] = {}

    def __call__(self, slot: TensorSlot, wide: torch.dtype, device: torch.device, scratch: Scratch) -> Numbers:
        """Those of a slot now, and of every slot with the same hyperparameters and number of updates.

        float64 arithmetic needs a buffer, as an argument of a kernel is float32; so does a learning rate on the device.
        """
        current, l2 = slot.hyperparameters, slot.rule.l2
        corrections = None if slot.capturable else slot.corrections
        if wide != torch.float32:
            return _numbers(current, l2, corrections, wide, device, scratch)
        key = id(current), l2  # what is kept keeps the object alive, so that no other one has its id
        known = self._known.get(key)
        if known is not None and known[1] == corrections:  # numbers of the host: nothing waits for a device
            return known[2]
        found = _numbers(current, l2, corrections, wide, device, scratch)
        if found.buffer is None:
            if len(self._known) >= REMEMBERED:  # hyperparameters of the past
                self._known.clear()
            self._known[key] = (current, corrections, found)
        return found


def _numbers(
    current: Hyperparameters, l2: bool, corrections: Any, wide: torch.dtype, device: torch.device, scratch: Scratch
) -> Numbers:
    fixed = Fixed(is_zero(current.beta1), is_zero(current.beta2), current.maximize)
    values = _values(current, l2, corrections)
    on_device = {position: value for position, value in enumerate(values) if isinstance(value, Tensor)}
    constants = tuple(0.0 if position in on_device else float(value) for position, value in enumerate(values))
    if wide == torch.float32 and not on_device:
        return Numbers(fixed, None, constants)
    buffer = scratch.constants(constants, wide)
    if on_device:
        buffer = buffer.clone()
        for position, value in on_device.items():
            buffer[position].copy_(value.reshape(()), non_blocking=True)
    return Numbers(fixed, buffer, (0.0,) * len(values))


def _values(current: Hyperparameters, l2: bool, corrections: Any) -> list[Any]:
    """In order. Without corrections, which follow from a number of updates on the device: 1-beta and log(beta)."""
    if corrections is None:
        betas = [(1.0 - beta, _log(beta)) for beta in (current.beta1, current.beta2)]
    else:
        betas = [(correction, 0.0) for correction in corrections]
    square = current.eps * current.eps
    floor = max(square, SMALLEST_NORMAL_FLOAT32) if isinstance(square, numbers.Real) else square
    decay = current.weight_decay if l2 else current.decay_rate
    return [*betas[0], *betas[1], current.learning_rate, current.eps, floor, decay]


def _log(beta: Any) -> Any:
    if isinstance(beta, numbers.Real):
        return math.log(beta) if beta != 0 else -math.inf
    return torch.log(beta.to(torch.float64))
