"""Sections that check laws: bounds against float64, and the same bits on every repeat, on every grid and under release."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.array_ops import numpy_ops
from penstock.core.compensation import possible
from penstock.core.dtypes import PARAMETER_DTYPES
from penstock.core.moments import bias_corrections
from penstock.core.update import TensorState, accumulate, apply, update
from penstock.parity.backends import choose
from penstock.parity.backends.torch_arguments import to_numpy
from penstock.parity.backends.torch_optimizers import TorchBackend
from penstock.parity.cases import QUICK_STEP_COUNTS, STEP_COUNTS
from penstock.parity.sections import select
from penstock.parity.suite import run_sections
from penstock.torch_frontend import Adam, AdamW, StableAdamW
from penstock.torch_frontend.backends.triton.configuration import TABLE
from penstock.torch_frontend.groups import hyperparameters
from penstock.torch_frontend.state import MOMENTS

from .setting import BETAS, Setting

NUMELS = [1, 3, 17, 1023, 8191, 8193, 100_003, 1 << 20, 5_000_001]
DRY_NUMELS = [1, 17, 1500, 129]
BEYOND = 2**31 + 4099


def parity(setting: Setting) -> dict[str, Any]:
    """Run all sections of `penstock parity` on the device, for both frameworks: every figure is within its bound.

    The compiled backend takes part only with --full-parity, because torch.compile takes many seconds for each case.
    """
    names = ["triton"] if setting.dry else ["triton", "eager", *(["compiled"] if setting.full_parity else [])]
    here = [TorchBackend(name, setting.device) for name in names]
    usual = choose(None, quick=not setting.full_parity)[0]
    others = [] if setting.dry else [backend for backend in usual if backend.name in ("jax", "walk")]
    cases = select("shapes/stable_adamw/bfloat16/*" if setting.dry else None, quick=not setting.full_parity)
    steps = [1, 2] if setting.dry else STEP_COUNTS if setting.full_parity else QUICK_STEP_COUNTS
    left_out = {backend.name: reason for backend in here if (reason := backend.unavailable()) is not None}
    running = [backend for backend in here if backend.name not in left_out]
    result = run_sections([*running, *others], cases, steps)
    worst: dict[str, dict[str, float]] = {}
    for found in result.sections:
        of_section = worst.setdefault(found.section.name, {})
        for row in found.rows:
            if row.judged and row.quantity == "parameter":
                of_section[row.backend] = max(of_section.get(row.backend, 0.0), row.element_ratio)
    return {
        "holds": not result.broken and any(row.judged for row in result.rows),
        "comparisons": sum(row.judged for row in result.rows),
        "broken": [row.as_json() for row in result.broken],
        "largest_ratio_to_bound": worst,
        "not_available": left_out,
    }


def soak(setting: Setting) -> dict[str, Any]:
    """Repeat one clipped step a thousand times from the same start: every bit is the same each time, and on other grids."""
    results: dict[str, Any] = {"repeats": setting.few(1000)}
    kind = ("cpu" if setting.dry else "cuda", None)
    chosen = TABLE[kind]
    for dtype, compensation in ((torch.float32, "none"), (torch.bfloat16, "split")):
        parameters = setting.parameters(DRY_NUMELS if setting.dry else NUMELS, dtype)
        optimizer = StableAdamW(parameters, lr=1e-2, betas=BETAS, compensation=compensation, backend="triton")
        optimizer.step()
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(30)
        memory = _memory(optimizer, parameters)
        start = [x.clone() for x in memory]
        optimizer.step()
        expected = [x.clone() for x in memory]
        different = torch.zeros((), dtype=torch.int64, device=setting.device)
        for _ in range(results["repeats"]):
            _restore(memory, start)
            optimizer.step()
            different += _differing(memory, expected)
        on_other_grids = 0
        for programs, wave_bytes in ((1, 2**16), (chosen.programs, 2**30)):
            TABLE[kind] = dataclasses.replace(chosen, programs=programs, wave_bytes=wave_bytes)
            _restore(memory, start)
            optimizer.step()
            on_other_grids += int(_differing(memory, expected))
        TABLE[kind] = chosen
        alone = torch.zeros((), dtype=torch.int64, device=setting.device)
        for _ in range(setting.few(100)):
            _restore(memory, start)
            for p in parameters:
                _update_alone(optimizer, p)
            alone += _differing(memory, expected)
        results[f"{dtype}"] = {
            "elements_that_differed": int(different),
            "on_other_grids": on_other_grids,
            "one_launch_a_tensor": int(alone),
        }
    figures = [count for value in results.values() if isinstance(value, dict) for count in value.values()]
    return {"holds": not any(figures), **results}


def beyond_32_bits(setting: Setting) -> dict[str, Any]:
    """Update a tensor of more than 2^31 elements: all elements are right, in each kind of launch."""
    n = 1000 if setting.dry else BEYOND
    right: dict[str, int] = {}
    for optimizer_class in (AdamW, StableAdamW):
        for name in ("step", "one tensor"):
            p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=setting.device))
            p.grad = torch.full_like(p, 0.5)
            optimizer = optimizer_class([p], lr=0.25, betas=BETAS, weight_decay=0.0, compensation="none", backend="triton")
            if name == "step":
                optimizer.step()
            else:
                _update_alone(optimizer, p)
            right[f"{optimizer_class.__name__}, {name}"] = sum(int((x == 0.75).sum()) for x in p.detach().split(2**28))
            del p, optimizer
            setting.clean_up()
    return {"holds": all(count == n for count in right.values()), "elements": n, "right": right}


def one_tensor(setting: Setting) -> dict[str, Any]:
    """Compare the launches of release, in every specialisation, with the specification in numpy.

    Three updates of one tensor: one update; two accumulated micro-batches and an update with a third; one accumulated
    micro-batch and apply. Gradients shrink, so that nothing is clipped, and the bound is a few roundings.
    """
    broken, worst = [], {}
    for dtype, compensation in STORED:
        for optimizer_class in (StableAdamW, AdamW, Adam):
            for n in (130,) if setting.dry else (1, 17, 8193, 100_003):
                ratio = _largest_ratio(setting, optimizer_class, dtype, compensation, n)
                key = f"{optimizer_class.__name__} {str(dtype).removeprefix('torch.')} {compensation}"
                worst[key] = max(worst.get(key, 0.0), ratio)
                if not ratio <= 1:
                    broken.append(f"{key}, {n} elements")
    return {"holds": not broken, "broken": broken, "largest_ratio_to_bound": worst}


STORED = [(getattr(torch, dtype), compensation) for dtype in PARAMETER_DTYPES for compensation in possible(dtype)]


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
    expected = TensorState(*(to_numpy(state[key]) for key in MOMENTS), stored)
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
                parameter, expected = apply(*common, compensation, parameter, expected)
        slot.state["step"] += 1
    pairs = [(p, parameter, dtype)]
    pairs += [
        (state[key], moment, state[key].dtype)
        for key, moment in zip(MOMENTS, (expected.exp_avg, expected.exp_avg_sq), strict=True)
    ]
    ratios = []
    for got, right, kind in pairs:
        error = np.abs(to_numpy(got).astype(np.float64) - right.astype(np.float64))
        ratios.append(float(np.max(error / (8 * torch.finfo(kind).eps * (np.abs(right.astype(np.float64)) + 1e-2)))))
    return max(ratios)


def _update_alone(optimizer: Any, p: torch.nn.Parameter) -> None:
    """Update one tensor as release does."""
    assert p.grad is not None
    with torch.no_grad():
        optimizer._backend.update(optimizer._slot(p), p.grad, first=True)
    optimizer.state[p]["step"] += 1


def graph(setting: Setting) -> dict[str, Any]:
    """Replay a captured step: it gives the bits of steps that are launched one by one; and the time of a replay."""
    if setting.dry:
        return {"left_out": "a CPU has no CUDA graphs"}
    results = []
    for captured in (False, True):
        parameters = setting.parameters(setting.shapes("124M"), torch.bfloat16)
        optimizer = StableAdamW(
            parameters, lr=torch.tensor(1e-3, device=setting.device), betas=BETAS, capturable=True, backend="triton"
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which initialises parameters and gradients
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        run = optimizer.step
        if captured:
            cuda_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cuda_graph):
                optimizer.step()
            run = cuda_graph.replay
        for _ in range(5):
            run()
        memory = [x.clone() for x in _memory(optimizer, parameters)]
        results.append((memory, {"device_ms": setting.device_ms(run), **setting.wall_ms(run)}))
    differing = int(_differing(results[0][0], results[1][0]))
    return {"holds": differing == 0, "elements_that_differed": differing, "launched": results[0][1], "replayed": results[1][1]}


def _memory(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    found: list[Tensor] = []
    for p in parameters:
        found += [p.detach(), *(x for x in optimizer.state[p].values() if isinstance(x, Tensor))]
    return found


def _restore(memory: list[Tensor], start: list[Tensor]) -> None:
    for x, saved in zip(memory, start, strict=True):
        x.copy_(saved)


def _differing(memory: list[Tensor], expected: list[Tensor]) -> Tensor:
    """Return the number of elements that differ in any bit; without step counts, which are not restored on the CPU."""
    pairs = [(_bits(x), _bits(y)) for x, y in zip(memory, expected, strict=True) if x.dim()]
    return torch.stack([(x != y).sum() for x, y in pairs]).sum()


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
