"""Stage 2: time of the kernels over the bandwidth floor: in every way to launch them, and with one knob changed at a time."""

from __future__ import annotations

import csv
import dataclasses
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.triton.batches import batches_of
from penstock.torch_frontend.backends.triton.configuration import TABLE
from penstock.torch_frontend.backends.triton.launch import launch_all

from .setting import BETAS, STORAGES, Setting, Storage
from .tools import run_tool

GOALS = {"124M": 1.10, "1B": 1.15}
"""Largest ratio to the floor of the ticketed launch."""

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct", "gpu__time_duration.sum")

Run = Callable[[], Any]


def bandwidth(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure the bandwidth of a copy of 4 GiB of random numbers, twice: their difference is noise."""
    for _ in range(2):
        setting.__dict__.pop("bandwidth", None)
        yield {"copy_bytes_per_second": setting.bandwidth}


def optimizer_of(setting: Setting, model: str, storage: Storage, kind: Any = StableAdamW, **options: Any) -> Any:
    """Return an optimizer of a model's parameters, which have gradients."""
    parameters = setting.parameters(setting.shapes(model), storage.dtype, coded=storage.coded)
    given: dict[str, Any] = {"betas": BETAS, **storage.options, "backend": "triton"}
    return kind(parameters, lr=1e-3, **given | options)


def phases(optimizer: Any) -> dict[str, Run]:
    """Return the launches of an optimizer's step: both of the pair, and each of them."""
    backend = optimizer._backend
    slots = [optimizer._slot(p) for p in optimizer.param_groups[0]["params"]]
    with torch.no_grad():  # matrices in 8 bits and the small tensors beside them are two batches
        pairs = [backend._two_launches(batch, None) for batch in batches_of([(slot, slot.parameter.grad) for slot in slots])]
    measure, write = [launch for pair in pairs for launch in pair.measure], [pair.write for pair in pairs]
    return {
        "pair": lambda: launch_all([*measure, *write]),
        "measure only": lambda: launch_all(measure),
        "write only": lambda: launch_all(write),
    }


def ways(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time every way to update, against the floor of a step, and against the bytes that the way itself moves."""
    for model in ("124M", "1B"):
        for storage in setting.first(STORAGES):
            floor, extra = storage.floor_bytes, storage.measured_bytes
            optimizer = optimizer_of(setting, model, storage)
            yield _row(setting, model, storage, "ticketed", floor + extra, optimizer.step)
            own = {"pair": floor + extra, "measure only": extra, "write only": floor}
            for way, run in phases(optimizer).items():
                yield _row(setting, model, storage, way, own[way], run)
            for way, kind, options in (("AdamW", AdamW, {}), ("capturable", StableAdamW, {"capturable": True})):
                optimizer = run = None
                setting.clean_up()
                optimizer = optimizer_of(setting, model, storage, kind, **options)
                yield _row(setting, model, storage, way, floor + extra * (way != "AdamW"), optimizer.step)
            optimizer = run = None
            setting.clean_up()


def _row(setting: Setting, model: str, storage: Storage, way: str, own_bytes: float, run: Run) -> dict[str, Any]:
    elements = sum(setting.shapes(model))
    found: dict[str, Any] = {"model": model, "storage": storage.name, "way": way}
    found["device_ms"] = setting.device_ms(run)
    found |= setting.wall_ms(run)
    for name, size in (("floor", storage.floor_bytes), ("own_bytes", own_bytes)):
        ms = 1e3 * size * elements / setting.bandwidth
        found |= {f"{name}_ms": ms, f"ratio_to_{name}": found["device_ms"] / ms}
    found["ratio_to_floor_back_to_back"] = found["back_to_back_ms"] / found["floor_ms"]
    return found | ({"goal": GOALS[model]} if way == "ticketed" else {})


def counters(setting: Setting) -> Iterator[dict[str, Any]]:
    """Read the bytes of DRAM and the hits of the second-level cache with ncu, where it is installed.

    A step is one launch, or two with moments in 8 bits: the matrices', then that of what is too small for codes.
    """
    tool = shutil.which("ncu")
    if tool is None or setting.dry:
        yield {"missing": "ncu is not installed, or this is a dry run"}
        return
    for model in ("124M", "1B"):
        for storage in STORAGES:
            script = ["-m", "benchmarks.gpu.one_step", "--model", model, "--storage", storage.name]
            options = ["--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(METRICS)]
            done = run_tool([tool, *options, "-k", "regex:update_group", sys.executable, *script], 100)
            row = {"model": model, "storage": storage.name, "floor_bytes": storage.floor_bytes * sum(setting.shapes(model))}
            found = metrics(done.stdout)
            yield row | ({"launches": found} if found else {"failed": done.last_words})


def metrics(text: str) -> list[dict[str, str]]:
    """Return the metrics of each kernel in ncu's table, with their units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    units, *kernels = list(csv.DictReader(io.StringIO("\n".join(lines)))) or [{}]
    return [{name: f"{kernel[name]} {units[name]}" for name in METRICS if name in kernel} for kernel in kernels]


def knobs(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time steps with one field of the configuration changed, and with nothing changed, for noise."""
    kind = ("cpu" if setting.dry else "cuda", None)
    chosen = TABLE[kind]
    cache = setting.description()["cache_bytes"] or 2**22
    changes: list[dict[str, Any]] = [{}, {"tickets": False}, {"hints": False}]
    changes += [{"wave_bytes": int(cache * share)} for share in (0.0625, 0.25, 0.5, 64.0)]
    changes += [{"tiles": 8}, {"tiles": 32}, {"unroll": 1}, {"unroll": 4}, {"unroll": 1, "stages": 3}]
    changes += [{"programs": programs} for programs in (4, 6, 8, 12)] + [{"block": 2048, "warps": 8}, {}]
    two_warps: list[dict[str, Any]] = [{}, {"coded": 2 * chosen.coded}, {}]
    for storage in setting.first((STORAGES[2], STORAGES[0], STORAGES[1], STORAGES[3])):
        for model in ("124M", "1B"):
            optimizer = optimizer_of(setting, model, storage)
            floor_ms = 1e3 * storage.floor_bytes * sum(setting.shapes(model)) / setting.bandwidth
            tried = two_warps if storage.coded else changes
            for change in setting.first(tried[1:]) if setting.dry else tried:
                row: dict[str, Any] = {"model": model, "storage": storage.name, "change": change}
                try:
                    with mock.patch.dict(TABLE, {kind: dataclasses.replace(chosen, **change)}):
                        row["device_ms"] = setting.device_ms(optimizer.step, 10)
                    row["ratio_to_floor"] = row["device_ms"] / floor_ms
                except Exception as error:  # a configuration that does not compile
                    row["failed"] = setting.failure(error)
                yield row
            optimizer = None
            setting.clean_up()
