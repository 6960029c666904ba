"""The truth of trajectories: float64 gradients of the model, by plain autograd, fed into `core.reference`.

Release and held micro-batches are promised to be exact: their truth is that of a plain step on the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...core.reference import Gradient, Reference, ReferenceTensor, Settings
from ...core.rules import Rule
from ..demonstration.torch_model import Transformer
from .cases import LEARNING_RATE, MAX_NORM, MICROBATCHES, SHAPE, WEIGHT_DECAY, Trajectory, batches, flatten, start
from .disturbance import Disturbance

Values = Mapping[str, np.ndarray]
"""Flat float64 arrays: "parameter", "exp_avg" and "exp_avg_sq", debiased."""

SAMPLES = 2


def truth(case: Trajectory, norm_eps: float) -> Mapping[int, Values]:
    """The values after each of the case's numbers of steps; see `TrajectoryRun` for norm_eps."""
    return _trajectory(*_what(case), norm_eps if case.mode == "clip" else 0.0)


def disturbed(case: Trajectory) -> list[Mapping[int, Values]]:
    """The same of `SAMPLES` disturbed runs of the reference."""
    return [_trajectory(*_what(case), 0.0, seed) for seed in range(1, SAMPLES + 1)]


def _what(case: Trajectory) -> tuple[Rule, str, tuple[int, ...]]:
    return case.rule, case.mode if case.mode in ("clip", "state") else "exact", case.step_counts


@functools.lru_cache(maxsize=16)
def _trajectory(
    rule: Rule, kind: str, step_counts: Sequence[int], norm_eps: float, seed: int | None = None
) -> Mapping[int, Values]:
    accumulation = "state" if kind == "state" else None
    reference = Reference(
        Settings(rule.name, LEARNING_RATE, rule.betas, rule.eps, WEIGHT_DECAY, accumulation=accumulation), start("float64")
    )
    model = Transformer(start("float64"), SHAPE)
    disturbance = None if seed is None else Disturbance(seed)
    parts = MICROBATCHES if kind == "state" else 1
    found = {}
    for step in range(1, max(step_counts) + 1):
        before = {name: tensor.snapshot() for name, tensor in reference.tensors.items()}
        tokens = torch.from_numpy(batches().batch(step)).long()
        for number, part in enumerate(tokens.chunk(parts), 1):
            gradients = _gradients(model, before, part, disturbance)
            factor = 1.0 / parts
            if kind == "clip":
                norm = math.sqrt(sum(float(np.sum(gradient**2)) for gradient in gradients.values()))
                factor = min(1.0, MAX_NORM / (norm + norm_eps))
            if disturbance is not None:
                factor *= disturbance.of_scalar()
            for name, gradient in gradients.items():
                reference.run(Gradient(name, factor * gradient, last=number == parts))
        if disturbance is not None:
            for name, tensor in reference.tensors.items():
                disturbance.of_update(before[name], tensor)
        if step in step_counts:
            found[step] = _values(reference)
    return found


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


def _values(reference: Reference) -> Values:
    tensors = reference.tensors
    count = next(iter(tensors.values())).t
    first, second = (1.0 - beta**count for beta in reference.settings.betas)
    return {
        "parameter": flatten({name: tensor.parameter for name, tensor in tensors.items()}),
        "exp_avg": flatten({name: tensor.m for name, tensor in tensors.items()}) / first,
        "exp_avg_sq": flatten({name: tensor.v for name, tensor in tensors.items()}) / second,
    }
