"""The truth of trajectories: float64 gradients of the model, by plain autograd, fed into `core.reference`.

Release and held micro-batches are promised to be exact: their truth is that of a plain step on the whole batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from ...core.hyperparameters import Hyperparameters
from ...core.reference import Gradient, Reference, ReferenceTensor
from ...demonstration.torch_model import Transformer
from ..rules import held_by, hyperparameters_of, settings_of
from .cases import LEARNING_RATE, SHAPE, TERMS, WEIGHT_DECAY, Trajectory, batches, flatten, start
from .disturbance import Disturbance

Values = Mapping[str, np.ndarray]
"""Flat float64 arrays: "parameter" and the rule's fields, debiased."""

SAMPLES = 2


def truth(case: Trajectory, norm_eps: float) -> Mapping[int, Values]:
    """The values after each of the case's numbers of steps; see `TrajectoryRun` for norm_eps."""
    return _values_of(_representative(case), norm_eps if case.max_norm is not None else 0.0)


def disturbed(case: Trajectory) -> list[Mapping[int, Values]]:
    """The same of `SAMPLES` disturbed runs of the reference."""
    return [_values_of(_representative(case), 0.0, seed) for seed in range(1, SAMPLES + 1)]


def _representative(case: Trajectory) -> Trajectory:
    """Return one of the cases that share a truth."""
    return dataclasses.replace(case, mode="step" if case.mode in ("release", "hold") else case.mode, dtype="float64")


@functools.lru_cache(maxsize=16)
def _values_of(case: Trajectory, norm_eps: float, seed: int | None = None) -> Mapping[int, Values]:
    settings = settings_of(case.rule, _hyperparameters(case), "state" if case.mode == "state" else None)
    reference = Reference(settings, start("float64"))
    model = Transformer(start("float64"), SHAPE)
    disturbance = None if seed is None else Disturbance(seed)
    found = {}
    for step in range(1, max(case.step_counts) + 1):
        before = {name: tensor.snapshot() for name, tensor in reference.tensors.items()}
        parts = case.parts(batches().batch(step))
        for number, part in enumerate(parts, 1):
            gradients = _gradients(model, before, torch.from_numpy(part).long(), disturbance)
            factor = 1.0 / len(parts)
            if case.max_norm is not None:
                factor = _clip_factor(gradients, case.max_norm, norm_eps, disturbance)
            for name, gradient in gradients.items():
                reference.run(Gradient(name, factor * gradient, last=number == len(parts)))
        if disturbance is not None:
            for name, tensor in reference.tensors.items():
                disturbance.of_update(before[name], tensor)
        if step in case.step_counts:
            found[step] = _values(case, reference)
    return found


def _clip_factor(
    gradients: Mapping[str, np.ndarray], max_norm: float, norm_eps: float, disturbance: Disturbance | None
) -> float:
    """min(1, max_norm/norm). A sum of n squares is halved by the root; `rounding` multiplies by sqrt(TERMS) what is here."""
    norm = math.sqrt(sum(float(np.sum(gradient**2)) for gradient in gradients.values()))
    if disturbance is not None:
        count = sum(gradient.size for gradient in gradients.values())
        norm *= disturbance.of_scalar(0.5 * math.sqrt(count / TERMS))
    return min(1.0, max_norm / (norm + norm_eps))


def _gradients(
    model: Transformer, at: Mapping[str, ReferenceTensor], tokens: torch.Tensor, disturbance: Disturbance | None
) -> dict[str, np.ndarray]:
    """Of the mean loss over these sequences, by name."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(at[name].parameter))
    if disturbance is None:
        found = torch.autograd.grad(model.loss(tokens), list(named.values()))
    else:
        with disturbance.of_operations():
            found = torch.autograd.grad(model.loss(tokens), list(named.values()))
    return {name: gradient.numpy() for name, gradient in zip(named, found, strict=True)}


def _hyperparameters(case: Trajectory) -> Hyperparameters:
    """Return what the case's programs are to be given, not what they are."""
    return hyperparameters_of(case.rule, LEARNING_RATE, WEIGHT_DECAY)


def _values(case: Trajectory, reference: Reference) -> Values:
    held = {name: held_by(case.rule, _hyperparameters(case), tensor) for name, tensor in reference.tensors.items()}
    quantities = next(iter(held.values()))
    return {quantity: flatten({name: values[quantity] for name, values in held.items()}) for quantity in quantities}
