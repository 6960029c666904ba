"""PyTorch's methods: resident memory and state, times of steps, error against float64, and losses in training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks import resident
from benchmarks.methods import DTYPES, METHODS, Method
from benchmarks.release_overhead import host
from benchmarks.release_overhead.workloads import TINY, WORKLOADS
from penstock import parity
from penstock.core.compensation import possible
from penstock.demonstration.initialisation import initial_parameters
from penstock.demonstration.settings import ModelShape
from penstock.demonstration.text import Batches, read_text
from penstock.demonstration.torch_model import Transformer

NAMES = (
    "torch AdamW fused plain",
    "torch AdamW foreach plain",
    "torch AdamW fused in hooks",
    "optimi AdamW release",
    "FlashOptim AdamW release",
    "torchao AdamW8bit plain",
    "bitsandbytes AdamW8bit plain",
    "penstock AdamW plain, default",
    "penstock AdamW release, default",
    "penstock AdamW release, compact",
    "penstock AdamW release, smallest",
    "penstock StableAdamW release, default",
    "penstock StableAdamW release, stochastic",
)
"""Rows of `benchmarks.methods`. Another one is another name here."""

LOSS_SHAPE, LOSS_LR, LOSS_BATCH = ModelShape(width=128, layers=4, context=64), 1e-3, 8


def skipped() -> dict[str, str]:
    """Return the methods that cannot run here, and why."""
    reasons = {name: METHODS[name].missing() for name in NAMES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def chosen() -> Iterator[Method]:
    """Yield the methods that run here."""
    return (METHODS[name] for name in NAMES if METHODS[name].missing() is None)


def memory(*, quick: bool) -> dict[str, Any]:
    """Return "model", and method -> dtype -> bytes of the parameters, above the model, and of state: `benchmarks.resident`."""
    model = "tiny" if quick else "110M"
    found = resident.measure(NAMES, tuple(DTYPES), model)
    rows = {name: {dtype: of[name] for dtype, of in found.items() if name in of} for name in NAMES}
    return {"model": vars(resident.SHAPES[model]), "rows": {name: row for name, row in rows.items() if row}}


def times(*, quick: bool) -> dict[str, Any]:
    """Return method -> milliseconds of the first and of a step, microseconds for a gradient: `benchmarks.release_overhead`.

    The step is a whole one: the forward and backward passes, and what the method adds to them.
    """
    rounds = 2 if quick else 21
    small, medium = (
        host.measure(TINY if quick else WORKLOADS[name], rounds, patterns=NAMES)["rows"] for name in ("small", "medium")
    )
    rows = {
        name: {
            "step_ms": medium["bare"]["step_ms"] + medium[name]["over_ms"],
            "first_ms": medium[name]["first_ms"],
            "gradient_us": small[name]["per_tensor_us"],
        }
        for name in NAMES
        if name in medium
    }
    return {"rounds": rounds, "rows": rows}


def errors(*, quick: bool) -> dict[str, Any]:
    """Return method -> dtype -> relative error of the parameters against float64, by the cases B of `penstock parity`."""
    steps = 20 if quick else 2000
    found: dict[str, dict[str, float]] = {}
    for method in chosen():
        found[method.name] = {
            dtype: error
            for dtype in method.dtypes
            if not math.isnan(error := _error(method, str(DTYPES[dtype]).removeprefix("torch."), steps))
        }
    return {"steps": steps, "rows": found}


def _error(method: Method, dtype: str, steps: int) -> float:
    """Return the error after some steps, or NaN if the method refuses the case, or the suite cannot read what it keeps."""
    compensation = method.compensation if dtype == "bfloat16" else "none"
    if compensation not in possible(dtype):
        return math.nan
    case = f"B/{method.rule}/{dtype}/{compensation}/state-default"
    if method.suite is not None:
        return _first(parity.run([method.suite], case, [steps]))

    def make(parameters: Any, h: Any) -> torch.optim.Optimizer:
        return method.make(parameters, lr=h.learning_rate, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)

    def kept(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
        return {} if compensation == "none" else {"compensation": optimizer.state[parameter]["compensation"]}

    parity.register(parity.torch_optimizer(method.name, {method.rule: make}, {dtype: compensation}, kept=kept))
    try:
        return _first(parity.run([method.name], case, [steps]))
    finally:
        parity.unregister(method.name)


def _first(rows: Sequence[parity.Row]) -> float:
    return next(row.relative_error for row in rows if row.quantity == "parameter")


def losses(pairs: Sequence[tuple[str, str]], *, quick: bool) -> dict[str, Any]:
    """Train the demonstration's transformer by each (method, dtype) that runs here; return "method, dtype" -> losses."""
    steps, shape = (3, ModelShape(width=16, layers=2, heads=2, context=16)) if quick else (200, LOSS_SHAPE)
    text = read_text(None, at_least=shape.context + 1)
    batches = Batches(text, batch_size=LOSS_BATCH, context=shape.context, seed=0)
    initial = initial_parameters(shape, seed=0, dtype="float32")
    found = {}
    for name, dtype in pairs:
        if METHODS[name].missing() is not None:
            continue
        model = Transformer(initial, shape).to(DTYPES[dtype])
        close = METHODS[name].attach(model, lr=LOSS_LR).close
        of_steps = []
        for step in range(steps):
            tokens = torch.from_numpy(batches.batch(step)).long()
            loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            close()
            of_steps.append(loss.item())
        found[f"{name}, {dtype}"] = of_steps
    return {"lr": LOSS_LR, "batch": LOSS_BATCH, "model": vars(shape), "rows": found}
