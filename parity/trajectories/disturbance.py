"""Monte Carlo arithmetic: every operand of a float64 run is disturbed by a small random relative amount.

`parity.trajectories.rounding` says what it is for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.reference import ReferenceTensor
from ..bounds import ARITHMETIC, CORRECTION

AMOUNT = 2.0**-36
"""delta: small enough that its square does not matter, large against the unit roundoff of float64, 2^-53."""

_DRAWN = 2**18
"""Random numbers are drawn in advance, and read from a random place on: that takes a third of the time."""


class Disturbance:
    """The random numbers of one run, 1 + delta*xi with xi uniform in [-1, 1]."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._drawn = 1.0 + AMOUNT * self._generator.uniform(-1.0, 1.0, _DRAWN)
        self._drawn_tensor = torch.from_numpy(self._drawn)

    def of_operations(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which every operation of PyTorch, those of a backward pass too, sees disturbed operands."""
        return _DisturbedOperands(self)

    def of_scalar(self, roundings: float) -> float:
        """A factor for a number that all elements share, `roundings` times as large as for others."""
        return 1.0 + roundings * AMOUNT * float(self._generator.uniform(-1.0, 1.0))

    def of_tensor(self, x: Tensor) -> Tensor:
        """Of a tensor of at most `_DRAWN` elements; integers stay as they are."""
        if not x.is_floating_point():
            return x
        first = int(self._generator.integers(_DRAWN - x.numel()))
        return x * self._drawn_tensor[first : first + x.numel()].view(x.shape)

    def of_update(self, before: ReferenceTensor, after: ReferenceTensor) -> None:
        """What an update rounds: `bounds.ARITHMETIC` times in a step, and what is stored; the moments accordingly."""
        for name, roundings in (("parameter", ARITHMETIC), ("m", CORRECTION + 2), ("v", CORRECTION + 3)):
            old, new = getattr(before, name), getattr(after, name)
            xi = self._generator.uniform(-1.0, 1.0, new.shape)
            setattr(after, name, new + AMOUNT * xi * (np.abs(new) + roundings * np.abs(new - old)))


class _DisturbedOperands(TorchDispatchMode):
    def __init__(self, disturbance: Disturbance) -> None:
        super().__init__()
        self._disturbance = disturbance

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (function.is_view or function._schema.is_mutable):
            args = self._disturbed(args)
        return function(*args, **(kwargs or {}))

    def _disturbed(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._disturbance.of_tensor(argument)
        if isinstance(argument, tuple | list):
            return type(argument)(self._disturbed(each) for each in argument)
        return argument
