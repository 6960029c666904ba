"""The results of a run, and the difference between two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .initialisation import Parameters

MIB = 2**20  # bytes
Report = Callable[[float], None]  # called after every step with its loss


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run.

    name: for people. losses: of every step, in nats per byte. parameters: after the last step. seconds: the training loop
    took. peak_gradient_bytes: most bytes of gradient alive at any moment of the run, measured; timeline: bytes alive at
    each arrival of a gradient in the last backward pass, and after it; None and empty for JAX, where nobody can look inside
    a compiled step. peak_step_bytes: most bytes that a compiled step holds (parameters, moments, gradients, activations), by
    XLA's analysis; None for PyTorch, and where XLA does not tell. state_bytes: that the optimizer keeps from step to step.
    """

    name: str
    losses: Sequence[float]
    parameters: Parameters
    seconds: float
    peak_gradient_bytes: int | None = None
    timeline: Sequence[int] = ()
    peak_step_bytes: int | None = None
    state_bytes: int | None = None


def relative_difference(parameters: Parameters, reference: Parameters) -> float:
    """The largest over all tensors of max|p - r| / max|r|: relative to the tensor's largest element in the reference.

    A NaN anywhere makes it NaN.
    """
    differences = [
        np.max(np.abs(parameters[name] - value)) / max(np.max(np.abs(value)), np.finfo(value.dtype).tiny)
        for name, value in reference.items()
    ]
    return float(np.max(differences))  # Python's max would drop a NaN
