"""Sections that are fast or slow: steps against the bandwidth floor and peers, what the launch settings do, release."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton.configuration import TABLE

from .setting import BETAS, STORAGES, Setting, Storage

GOALS = {"1B": (1.15, 1.1), "124M": (1.10, 4.0)}
"""By model: the largest ratio to the floor, and the least speed-up over optimi, that StableAdamW is meant to have."""

TRANSFORMER = (2048, 16, 512, 8)
"""Width, layers, length and batch of the model that is trained plain and released."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def bandwidth(setting: Setting) -> dict[str, Any]:
    """What a copy of 4 GiB moves."""
    return {"copy_bytes_per_second": setting.bandwidth}


def penstock_optimizers(storage: Storage) -> dict[str, Make]:
    """The two that are measured against the floor."""
    arguments: dict[str, Any] = {"betas": BETAS, "compensation": storage.compensation, "backend": "triton"}
    return {
        "penstock StableAdamW": lambda p: StableAdamW(p, lr=1e-3, **arguments),
        "penstock AdamW": lambda p: AdamW(p, lr=1e-3, **arguments),
    }


def peers(storage: Storage) -> tuple[dict[str, Make], dict[str, str]]:
    """torch's fused AdamW, and the others that are installed, each as its documentation constructs it; why others are not."""
    absent: dict[str, str] = {}
    found: dict[str, Make] = {"torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=BETAS, fused=True)}
    kahan = storage.compensation != "none"
    optional: dict[str, tuple[str, str, dict[str, Any]]] = {
        "optimi StableAdamW": ("optimi", "StableAdamW", {"betas": BETAS, "kahan_sum": kahan}),
        "optimi AdamW": ("optimi", "AdamW", {"betas": BETAS, "kahan_sum": kahan}),
        "FlashOptim AdamW": ("flashoptim", "FlashAdamW", {"betas": BETAS}),
        "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {"betas": BETAS}),
    }
    for name, (module, attribute, arguments) in optional.items():
        try:
            made = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a peer may fail in any way when it is imported
            absent[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = lambda p, made=made, arguments=arguments: made(p, lr=1e-3, **arguments)  # type: ignore[misc]
    return found, absent


def step_time(setting: Setting) -> dict[str, Any]:
    """Every optimizer on every model and storage, side by side; a peer that fails says why."""
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for model in ("124M", "1B", "7B"):
        numels = setting.shapes(model)
        for storage in STORAGES:
            others, absent = peers(storage)
            candidates = penstock_optimizers(storage) | ({} if model == "7B" else others)
            floor_ms = 1e3 * storage.floor_bytes(sum(numels)) / setting.bandwidth
            for name, make in candidates.items():
                row: dict[str, Any] = {"model": model, "storage": storage.name, "optimizer": name, "floor_ms": floor_ms}
                if setting.out_of_time:
                    rows.append({**row, "left_out": "there was no time left"})
                    continue
                try:
                    step = make(setting.parameters(numels, storage.dtype)).step
                    row |= {"device_ms": setting.device_ms(step), **setting.wall_ms(step)}
                    row["ratio_to_floor"] = row["device_ms"] / floor_ms
                    row["ratio_to_floor_back_to_back"] = row["back_to_back_ms"] / floor_ms
                except Exception as error:  # a peer that cannot, or a model that does not fit
                    row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split()[:30])}"
                step = None
                setting.clean_up()
                rows.append(row)
    return {
        "holds": not any("failed" in row for row in rows if row["optimizer"].startswith("penstock")),
        "goals": goals(rows),
        "absent": absent,
        "rows": rows,
    }


def goals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the kernels are meant to reach: by model and storage the ratio to the floor, and to optimi's StableAdamW.

    Whole steps back to back, launches included, which is what a loop without a backward pass would see.
    """
    found: dict[str, Any] = {}
    times = {(row["model"], row["storage"], row["optimizer"]): row for row in rows if "back_to_back_ms" in row}
    for (model, storage, optimizer), row in times.items():
        if optimizer != "penstock StableAdamW" or model not in GOALS:
            continue
        floor, speedup = GOALS[model]
        entry = {"ratio_to_floor": row["ratio_to_floor"], "meant_ratio_to_floor": floor}
        entry["ratio_to_floor_back_to_back"] = row["ratio_to_floor_back_to_back"]
        other = times.get((model, storage, "optimi StableAdamW"))
        if other is not None:
            entry |= {"speedup_over_optimi": other["back_to_back_ms"] / row["back_to_back_ms"], "meant_speedup": speedup}
        found[f"{model} {storage}"] = entry
    return found


def configurations(setting: Setting) -> dict[str, Any]:
    """Eviction hints on and off, sizes of waves, of items, and numbers of programs: what the table should say."""
    kind = ("cpu" if setting.dry else "cuda", None)
    chosen = TABLE[kind]
    cache = setting.description().get("cache_bytes") or 2**16
    changes: list[dict[str, Any]] = [{}, {"hints": False}]
    changes += [{"wave_bytes": int(cache * share)} for share in (0.125, 0.5, 1.0, 64.0)]
    changes += [{"wave_bytes": int(cache * 64.0), "hints": False}]
    if not setting.dry:
        changes += [{"tiles": 4}, {"tiles": 16}, {"programs": 4}, {"programs": 14}]
        changes += [
            {"registers": 56, "programs": 9},
            {"registers": 96, "programs": 5},
            {"block": 2048, "warps": 8, "programs": 3},
        ]
    rows = []
    for model in ("124M", "1B"):
        numels = setting.shapes(model)
        for storage in STORAGES:
            parameters = setting.parameters(numels, storage.dtype)
            optimizer = penstock_optimizers(storage)["penstock StableAdamW"](parameters)
            floor_ms = 1e3 * storage.floor_bytes(sum(numels)) / setting.bandwidth
            for change in changes:
                if setting.out_of_time:
                    return {"rows": rows, "left_out": "there was no time left for more"}
                TABLE[kind] = dataclasses.replace(chosen, **change)
                try:
                    taken = setting.device_ms(optimizer.step, 10)
                finally:
                    TABLE[kind] = chosen
                row = {"model": model, "storage": storage.name, "change": change, "device_ms": taken}
                rows.append({**row, "ratio_to_floor": taken / floor_ms})
            del parameters, optimizer
            setting.clean_up()
    return {"rows": rows}


def release(setting: Setting) -> dict[str, Any]:
    """A transformer in bfloat16, plain and released: time of a step, and peak of allocated bytes."""
    width, layers, length, batch = (16, 2, 4, 2) if setting.dry else TRANSFORMER
    found: dict[str, Any] = {"width": width, "layers": layers, "tokens": length * batch}
    losses = {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would take time
    for name in ("plain", "released"):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(setting.device, torch.bfloat16)
        optimizer = StableAdamW(model.parameters(), lr=1e-4, backend="triton")
        if name == "released":
            release_gradients(model, optimizer)
        batches = torch.randn(batch, length, width, device=setting.device).to(torch.bfloat16)

        def step(model: nn.Module = model, optimizer: StableAdamW = optimizer, x: torch.Tensor = batches) -> torch.Tensor:
            loss = (model(x) - x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(setting.few(3)):
            step()
        setting.synchronize()
        if not setting.dry:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        repetitions = setting.few(20)
        for _ in range(repetitions):
            step()
        setting.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - started) / repetitions
        losses[name] = float(step())
        found[name] = {"step_ms": milliseconds}
        if not setting.dry:
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
        del model, optimizer, step
        setting.clean_up()
    torch.use_deterministic_algorithms(False)
    close = abs(losses["plain"] - losses["released"]) <= 1e-2 * abs(losses["plain"])
    return {"holds": close, "the_same_bits": losses["plain"] == losses["released"], "losses": losses, **found}
