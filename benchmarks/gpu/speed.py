"""Sections that measure speed: steps against the bandwidth floor and peers, launch configurations, and release."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.support import failure
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.triton.configuration import TABLE

from .setting import BETAS, STORAGES, Setting, Storage

GOALS = {"1B": (1.15, 1.1), "124M": (1.10, 4.0)}
"""Goals for StableAdamW by model: the largest ratio to the floor, and the least speed-up over optimi."""

TRANSFORMER = (2048, 16, 512, 8)
"""Width, layers, length and batch of the model that is trained with and without release."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def bandwidth(setting: Setting) -> dict[str, Any]:
    """Measure the bandwidth of a copy of 4 GiB."""
    return {"copy_bytes_per_second": setting.bandwidth}


def penstock_optimizers(storage: Storage) -> dict[str, Make]:
    """Return this package's optimizers."""
    arguments: dict[str, Any] = {"betas": BETAS, "compensation": storage.compensation, "backend": "triton"}
    return {
        "penstock StableAdamW": lambda p: StableAdamW(p, lr=1e-3, **arguments),
        "penstock AdamW": lambda p: AdamW(p, lr=1e-3, **arguments),
    }


def peers(storage: Storage) -> tuple[dict[str, Make], dict[str, str]]:
    """Return torch's fused AdamW and the installed peers, constructed as in their documentation; and why others are absent."""
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
    """Time every optimizer on every model and storage; a row of a peer that fails says why."""
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
                    row["failed"] = failure(error)
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
    """Return figures and goals by model and storage: the ratio to the floor, and the speed-up over optimi's StableAdamW.

    Times are those of whole steps called repeatedly, launches included, as in a loop without a backward pass.
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
    """Time steps with other eviction hints, wave sizes, item sizes and numbers of programs than the table's."""
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
    """Measure a transformer in bfloat16 with and without release: time of a step, and peak of allocated bytes."""
    width, layers, length, batch = (16, 2, 4, 2) if setting.dry else TRANSFORMER
    found: dict[str, Any] = {"width": width, "layers": layers, "tokens": length * batch}
    losses = {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling would take time
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
