"""The scalars of a launch: as arguments where the host knows them, else in a small buffer on the device."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.moments import SMALLEST_NORMAL_FLOAT32
from ..backend import TensorSlot
from .memory import Scratch


class Numbers(NamedTuple):
    """What the kernels call first1, log1, first2, log2, lr, eps, floor and decay.

    buffer: all of them, in the compute dtype; None where `arguments` has them.
    arguments: float32 arguments of a launch. They are no part of what is compiled.
    """

    buffer: Tensor | None
    arguments: tuple[float, ...]


def numbers_of(slot: TensorSlot, wide: torch.dtype, device: torch.device, scratch: Scratch) -> Numbers:
    """Those of a slot, and of every slot with the same hyperparameters and number of updates.

    float64 arithmetic needs a buffer, as an argument of a kernel is float32; so does a learning rate on the device.
    """
    values = _values(slot)
    on_device = {position: value for position, value in enumerate(values) if isinstance(value, Tensor)}
    constants = tuple(0.0 if position in on_device else float(value) for position, value in enumerate(values))
    if wide == torch.float32 and not on_device:
        return Numbers(None, constants)
    buffer = scratch.constants(constants, wide)
    if on_device:
        buffer = buffer.clone()
        for position, value in on_device.items():
            buffer[position].copy_(value.reshape(()), non_blocking=True)
    return Numbers(buffer, (0.0,) * len(values))


def _values(slot: TensorSlot) -> list[Any]:
    current = slot.hyperparameters
    if slot.capturable:
        betas = [(1.0 - beta, _log(beta)) for beta in (current.beta1, current.beta2)]
    else:
        betas = [(complement, 0.0) for complement in slot.complements]
    square = current.eps * current.eps
    floor = max(square, SMALLEST_NORMAL_FLOAT32) if isinstance(square, numbers.Real) else square
    decay = current.weight_decay if slot.rule.l2 else current.decay_rate
    return [*betas[0], *betas[1], current.learning_rate, current.eps, floor, decay]


def _log(beta: Any) -> Any:
    if isinstance(beta, numbers.Real):
        return math.log(beta) if beta != 0 else -math.inf
    return torch.log(beta.to(torch.float64))
