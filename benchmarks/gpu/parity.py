"""Stage 7: every specialisation of the kernels of release against the specification, and `penstock parity`, quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.core.array_ops import numpy_ops
from penstock.core.compensation import possible
from penstock.core.dtypes import PARAMETER_DTYPES
from penstock.core.rules.adam_family import bias_corrections
from penstock.core.update import TensorState, accumulate, apply, update
from penstock.parity.backends import choose
from penstock.parity.backends.torch_arguments import to_numpy
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.cases import QUICK_STEP_COUNTS
from penstock.parity.sections import select
from penstock.parity.suite import run_sections
from penstock.torch_frontend import Adam, AdamW, StableAdamW
from penstock.torch_frontend.backends.backend import EXP_AVG, EXP_AVG_SQ
from penstock.torch_frontend.groups import hyperparameters

from .correctness import DRY_SIZES, SIZES
from .setting import BETAS, STORAGES, Setting

SUM_ERROR = 2.0**-18
"""Largest relative error of a sum of squares in float32: 64 roundings, of at most 32 tiles in turn and of trees."""

STORED = [(getattr(torch, dtype), compensation) for dtype in PARAMETER_DTYPES for compensation in possible(dtype)]


def parity(setting: Setting) -> Iterator[dict[str, Any]]:
    """Run all sections of `penstock parity` on the device, for PyTorch and then for both frameworks, within every bound.

    JAX compiles for each case, and time may run out.
    """
    here = [TorchBackend(name, setting.device) for name in (["triton"] if setting.dry else ["triton", "eager"])]
    others = [] if setting.dry else [backend for backend in choose(None, quick=True)[0] if backend.name in ("jax", "walk")]
    left_out = {backend.name: reason for backend in here if (reason := backend.unavailable()) is not None}
    running = [backend for backend in here if backend.name not in left_out]
    steps = [1] if setting.dry else QUICK_STEP_COUNTS
    chosen = select("shapes/stable_adamw/bfloat16/*" if setting.dry else None, quick=True)
    yield {"not_available": left_out}
    for backends in [running, [*running, *others]] if others else [running]:
        for one in chosen:  # a section at a time, so that figures are written as they come
            result = run_sections(backends, [one], steps)
            worst: dict[str, float] = {}
            for row in result.rows:
                if row.judged and row.quantity == "parameter":
                    worst[row.backend] = max(worst.get(row.backend, 0.0), row.element_ratio)
            yield {
                "section": one[0].name,
                "backends": [backend.name for backend in backends],
                "comparisons": sum(row.judged for row in result.rows),
                "broken": [row.as_json() for row in result.broken],
                "largest_ratio_to_bound": worst,
                "holds": not result.broken,
            }


def one_tensor(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compare the launches of release, in every specialisation, with the specification in numpy.

    Three updates of one tensor: one update; two accumulated micro-batches and an update with a third; one accumulated
    micro-batch and apply. Gradients shrink, so that nothing is clipped, and the bound is a few roundings.
    """
    for dtype, compensation in setting.first(reversed(STORED)):
        for optimizer_class in setting.first((StableAdamW, AdamW, Adam)):
            sizes = (130,) if setting.dry else (1, 17, 8193, 100_003)
            worst = max(_largest_ratio(setting, optimizer_class, dtype, compensation, n) for n in sizes)
            name = f"{optimizer_class.__name__} {dtype} {compensation}"
            yield {"specialisation": name, "largest_ratio_to_bound": worst, "holds": worst <= 1}


def norms(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compare the sums of the gradients' squares that updates compute, alone and together, with float64 and with each other."""
    for storage in setting.first(STORAGES):
        for optimizer_class in setting.first((StableAdamW, AdamW)):
            sums = []
            for alone in (True, False):
                parameters = setting.parameters(DRY_SIZES[0] if setting.dry else SIZES[2], storage.dtype, coded=storage.coded)
                optimizer = optimizer_class(parameters, lr=1e-2, betas=BETAS, **storage.options, backend="triton")
                backend, pairs = optimizer._backend, [(optimizer._slot(p), p.grad) for p in parameters]
                with torch.no_grad():
                    if alone:
                        found = [backend.update(*pair, first=True, measure=True) for pair in pairs]
                    else:
                        found = backend.update_all(pairs, measure=True)
                sums.append(torch.stack(found).double())
            right = torch.stack([p.grad.double().square().sum() for p in parameters])
            error, same = float(((sums[1] - right).abs() / right).max()), torch.equal(*sums)
            row = {"storage": storage.name, "optimizer": optimizer_class.__name__, "largest_relative_error": error}
            yield row | {"same_bits": same, "holds": same and error < SUM_ERROR}


def _largest_ratio(setting: Setting, optimizer_class: Any, dtype: torch.dtype, compensation: str, n: int) -> float:
    """Return the largest error of parameter and moments, divided by the bound: 8 roundings of the dtype."""
    generator = torch.Generator().manual_seed(n)
    start = torch.randn(n, generator=generator).to(dtype)
    gradients = [(torch.randn(n, generator=generator) * 0.5**i).to(dtype) for i in range(6)]
    p = torch.nn.Parameter(start.to(setting.device))
    optimizer = optimizer_class([p], lr=1e-2, betas=BETAS, weight_decay=0.1, compensation=compensation, backend="triton")
    backend, current = optimizer._backend, hyperparameters(optimizer.param_groups[0])
    state = optimizer._slot(p).state
    stored = to_numpy(state["compensation"]) if compensation != "none" else None
    expected = TensorState(tuple(to_numpy(state[key]) for key in (EXP_AVG, EXP_AVG_SQ)), stored)
    parameter = to_numpy(p)
    for t, given in enumerate((gradients[:1], gradients[1:4], gradients[4:5]), 1):
        slot, corrections = optimizer._slot(p), bias_corrections(current, t, np)
        common = (numpy_ops, optimizer.rule, current)
        with torch.no_grad(), np.errstate(all="ignore"):
            for i, gradient in enumerate(given):
                g, first, last = gradient.to(setting.device), i == 0, i == len(given) - 1 and t < 3
                launch = backend.update if last else backend.accumulate
                launch(slot, g, first=first)
                arguments = (*common, corrections, compensation, parameter)
                if last:
                    parameter, expected = update(*arguments, to_numpy(gradient), expected, first=first)
                else:
                    expected = accumulate(*arguments, to_numpy(gradient), expected, first=first)
            if t == 3:
                backend.apply(slot)
                parameter, expected = apply(*common, corrections, compensation, parameter, expected)
        slot.state["step"] += 1
    pairs = [(p, parameter, dtype)]
    pairs += [
        (state[key], moment, state[key].dtype) for key, moment in zip((EXP_AVG, EXP_AVG_SQ), expected.fields, strict=True)
    ]
    ratios = []
    for got, right, kind in pairs:
        error = np.abs(to_numpy(got).astype(np.float64) - right.astype(np.float64))
        ratios.append(float(np.max(error / (8 * torch.finfo(kind).eps * (np.abs(right.astype(np.float64)) + 1e-2)))))
    return max(ratios)
