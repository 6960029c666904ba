"""The scalars of a launch: arguments if the host knows them, otherwise in a small buffer on the device."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ....core.hyperparameters import is_zero
from ....core.rules.adam_family import SMALLEST_NORMAL_FLOAT32, AdamHyperparameters
from ..backend import TensorSlot
from .memory import CACHED_NUMBERS, Scratch


class CompiledIn(NamedTuple):
    """The hyperparameters that are compiled in: whether beta1 and beta2 are known to be 0, and the sign of the step."""

    zero1: bool
    zero2: bool
    maximize: bool


class LaunchNumbers(NamedTuple):
    """The kernels' first1, log1, first2, log2, lr, eps, floor and decay.

    fixed: the hyperparameters that are compiled in.
    buffer: all eight scalars in the compute dtype, on the device; None if `arguments` has them.
    arguments: all eight scalars as float32 arguments of a launch, which are not compiled in; 0 if `buffer` has them.
    """

    fixed: CompiledIn
    buffer: Tensor | None
    arguments: tuple[float, ...]


class NumbersCache:
    """Computes the scalars of launches, once per update for all tensors of a group."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[AdamHyperparameters, Any, LaunchNumbers]] = {}

    def __call__(self, slot: TensorSlot, dtype: torch.dtype, device: torch.device, scratch: Scratch) -> LaunchNumbers:
        """Return the scalars of every slot with this slot's hyperparameters and number of updates.

        A kernel's scalar argument is float32: float64 arithmetic needs a buffer, and so does a learning rate on the device.
        """
        current, l2 = cast("AdamHyperparameters", slot.hyperparameters), slot.rule.l2
        corrections = None if slot.capturable else slot.corrections
        if dtype != torch.float32:
            return _numbers(current, l2, corrections, dtype, device, scratch)
        key = id(current), l2  # the entry refers to the object, so that no other one gets its id
        known = self._known.get(key)
        if known is not None and known[1] == corrections:  # numbers on the host: comparing them does not synchronise
            return known[2]
        found = _numbers(current, l2, corrections, dtype, device, scratch)
        if found.buffer is None:
            if len(self._known) >= CACHED_NUMBERS:
                self._known.clear()
            self._known[key] = (current, corrections, found)
        return found


def _numbers(
    current: AdamHyperparameters, l2: bool, corrections: Any, dtype: torch.dtype, device: torch.device, scratch: Scratch
) -> LaunchNumbers:
    fixed = CompiledIn(is_zero(current.beta1), is_zero(current.beta2), current.maximize)
    values = _values(current, l2, corrections)
    on_device = {position: value for position, value in enumerate(values) if isinstance(value, Tensor)}
    constants = tuple(0.0 if position in on_device else float(value) for position, value in enumerate(values))
    if dtype == torch.float32 and not on_device:
        return LaunchNumbers(fixed, None, constants)
    buffer = scratch.constants(constants, dtype)
    if on_device:
        buffer = buffer.clone()
        for position, value in on_device.items():
            buffer[position].copy_(value.reshape(()), non_blocking=True)
    return LaunchNumbers(fixed, buffer, (0.0,) * len(values))


def _values(current: AdamHyperparameters, l2: bool, corrections: Any) -> list[Any]:
    """Return the eight scalars in order.

    corrections: None if the number of updates is on the device; the kernel then computes them from 1-beta and log(beta).
    """
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
