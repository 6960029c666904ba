"""Stage 1: steps of three tensors against the eager backend and float64, from the smallest sizes up, and their repeats."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.triton.configuration import TABLE, Device, configuration

from .setting import BETAS, CODED, STORAGES, Setting, Storage, differing, memory_of, restore, update_alone

SIZES = [[1, 3, 17], [1023, 1025, 8191], [8193, 100_003, 1 << 20]]
DRY_SIZES = [[1, 130, 17]]
DRY_CODED_SIZES = [17, 32 * 129]
ROUNDINGS = 8
"""Bound on the difference of a step, in roundings of the parameter's dtype: some operations, and GPU's square roots."""


@contextlib.contextmanager
def grid_of(programs: int) -> Iterator[None]:
    """Let launches with tickets have this many programs."""
    original = Device.of
    one = {kind: dataclasses.replace(chosen, programs=1) for kind, chosen in TABLE.items()}
    with (
        mock.patch.object(Device, "of", lambda device: Device(programs, original(device).cache_bytes)),
        mock.patch.dict(TABLE, one),
    ):
        yield


def resident(setting: Setting, dtype: torch.dtype) -> int:
    """Return about the number of programs that are resident at once; twice as many are not."""
    device = torch.device(setting.device)
    return (configuration(device, dtype).programs or 10) * Device.of(device).multiprocessors


def steps(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compare a first step with the eager backend's and with float64, on grids of 1, resident, and twice as many programs.

    In launches of all tensors, and of one tensor at a time. (The first update of a tensor is never clipped: `repeats` has one.)
    """
    if setting.dry:
        yield {"sizes": DRY_CODED_SIZES, "storage": CODED[0].name, **_step(setting, AdamW, CODED[0], DRY_CODED_SIZES)}
    for sizes in DRY_SIZES if setting.dry else SIZES:
        for storage in _storages(setting):
            for optimizer_class in (StableAdamW, AdamW):
                yield {"sizes": sizes, "storage": storage.name, **_step(setting, optimizer_class, storage, sizes)}


def _storages(setting: Setting) -> list[Storage]:
    """Return all storages; in a dry run, whose tensors are too small for codes, those without them."""
    return [storage for storage in STORAGES if not (setting.dry and storage.coded)]


def _step(setting: Setting, optimizer_class: Any, storage: Storage, sizes: list[int]) -> dict[str, Any]:
    count, most = len(sizes), resident(setting, storage.dtype)
    found: dict[str, Any] = {"optimizer": optimizer_class.__name__}
    expected = {name: _after(setting, optimizer_class, storage, sizes, name) for name in ("eager", "float64")}
    first = None
    for programs in (1,) if setting.dry else (1, most, 2 * most):
        for alone in (False, True):
            with grid_of(programs):
                memory = _after(setting, optimizer_class, storage, sizes, "triton", alone)
            first = memory if first is None else first
            name = f"{programs} programs{', one tensor at a time' if alone else ''}"
            found[name] = {
                "elements_that_differ_from_the_first": int(differing(memory, first)),
                **{f"roundings_from_{other}": _roundings(memory, x, count) for other, x in expected.items()},
            }
    figures = [row for row in found.values() if isinstance(row, dict)]
    found["holds"] = all(
        row["elements_that_differ_from_the_first"] == 0
        and max(row["roundings_from_eager"], row["roundings_from_float64"]) <= ROUNDINGS
        for row in figures
    )
    return found


def _after(
    setting: Setting, optimizer_class: Any, storage: Storage, sizes: list[int], backend: str, alone: bool = False
) -> list[torch.Tensor]:
    """Return parameters and state after one step from random values; unwritten elements would be NaN in the moments."""
    parameters = setting.parameters(sizes, storage.dtype, coded=storage.coded)
    options = storage.options
    if backend == "float64":
        backend, options = "eager", {}
        parameters = [torch.nn.Parameter(p.detach().double()) for p in parameters]
        for p, like in zip(parameters, setting.parameters(sizes, storage.dtype, coded=storage.coded), strict=True):
            assert like.grad is not None
            p.grad = like.grad.double()
    optimizer = optimizer_class(parameters, lr=1e-2, betas=BETAS, **options, backend=backend)
    if alone:
        for p in parameters:
            update_alone(optimizer, p)
    else:
        optimizer.step()
    return memory_of(optimizer, parameters)


def _roundings(memory: list[torch.Tensor], expected: list[torch.Tensor], count: int) -> float:
    """Return the largest difference of the parameters, which are the first `count`, in roundings of their own size."""
    worst = 0.0
    for x, y in zip(memory[:count], expected[:count], strict=True):
        ratio = (x.double() - y.double()).abs() / (torch.finfo(x.dtype).eps * (y.double().abs() + 1e-2))
        worst = max(worst, float(ratio.nan_to_num(nan=float("inf")).max()))
    return worst


def repeats(setting: Setting) -> Iterator[dict[str, Any]]:
    """Repeat one clipped step 200 times from the same start: every bit is the same each time; and compare it with eager's."""
    for storage in _storages(setting):
        parameters = setting.parameters(DRY_SIZES[0] if setting.dry else SIZES[2], storage.dtype, coded=storage.coded)
        optimizer = StableAdamW(parameters, lr=1e-2, betas=BETAS, **storage.options, backend="triton")
        optimizer.step()
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(30)
        clipped = _eager_step(parameters, storage, optimizer.state_dict())
        memory = memory_of(optimizer, parameters)
        start = [x.clone() for x in memory]
        counts, expected = [], None
        for _ in range(setting.few(200, 2)):
            restore(memory, start)
            for p in parameters:
                optimizer.state[p]["step"].fill_(1)
            optimizer.step()
            expected = [x.clone() for x in memory] if expected is None else expected
            counts.append(differing(memory, expected))
        total, roundings = int(torch.stack(counts).sum()), _roundings(memory, clipped, len(clipped))
        row = {"storage": storage.name, "repeats": len(counts), "elements_that_differed": total}
        yield row | {"roundings_from_eager": roundings, "holds": total == 0 and roundings <= 2 * ROUNDINGS}


def _eager_step(parameters: list[torch.nn.Parameter], storage: Storage, state: dict[str, Any]) -> list[torch.Tensor]:
    """Return copies of the parameters after a step of the eager backend with this optimizer state."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for mine, p in zip(copies, parameters, strict=True):
        mine.grad = p.grad
    optimizer = StableAdamW(copies, lr=1e-2, betas=BETAS, **storage.options, backend="eager")
    optimizer.load_state_dict(copy.deepcopy(state))  # it takes tensors over as they are
    optimizer.step()
    return [p.detach() for p in copies]
