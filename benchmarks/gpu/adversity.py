"""Stage 3: what goes wrong late: graphs, other work beside the kernels, long runs, odd addresses, and bad accesses."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_frontend import AdamW, StableAdamW

from .correctness import DRY_SIZES, SIZES
from .setting import BETAS, STORAGES, Setting, differing, memory_of, update_alone
from .tools import run_tool

BEYOND = 2**31 + 4099

CHECKS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}
"""The tools of compute-sanitizer, and their options: calls of the driver that fail, as PyTorch's do, are no bad accesses."""


def _optimizer(parameters: list[nn.Parameter], **options: Any) -> StableAdamW:
    return StableAdamW(parameters, lr=options.pop("lr", 1e-2), betas=BETAS, backend="triton", **options)


def graph(setting: Setting) -> Iterator[dict[str, Any]]:
    """Replay a captured step a thousand times with a changing learning rate: the bits of steps launched one by one."""
    count = setting.few(1000, 2)
    memories, figures = [], {}
    for replayed in (False, True):
        parameters = setting.parameters(setting.shapes("124M"), torch.bfloat16)
        lr = torch.tensor(1e-3, device=setting.device)
        optimizer = _optimizer(parameters, lr=lr, capturable=True)
        with setting.another_stream():
            for _ in range(3):
                optimizer.step()
        run = setting.captured(optimizer.step) if replayed else optimizer.step
        for step in range(count):
            lr.fill_(1e-3 / (1 + step))
            run()
        memories.append([x.clone() for x in memory_of(optimizer, parameters)])
        figures["replayed" if replayed else "launched"] = {"device_ms": setting.device_ms(run), **setting.wall_ms(run)}
    total = int(differing(*memories))
    yield {"replays": count, "elements_that_differed": total, **figures, "holds": total == 0}


def soak(setting: Setting) -> Iterator[dict[str, Any]]:
    """Take a thousand steps twice, with gradients that sometimes are large: the same bits."""
    for storage in setting.first(reversed(STORAGES)):
        memories = []
        for _ in range(2):
            parameters = setting.parameters(DRY_SIZES[0] if setting.dry else SIZES[2], storage.dtype, coded=storage.coded)
            optimizer = _optimizer(parameters, **storage.options)
            for step in range(setting.few(1000, 2)):
                for p in parameters:
                    assert p.grad is not None
                    p.grad.mul_(30.0 if step % 7 == 3 else 1 / 30.0 if step % 7 == 4 else 1.0)
                optimizer.step()
            memories.append(memory_of(optimizer, parameters))
        total = int(differing(*memories))
        finite = all(bool(torch.isfinite(x).all()) for x in memories[0] if x.is_floating_point())
        yield {"storage": storage.name, "elements_that_differed": total, "finite": finite, "holds": total == 0 and finite}


def streams(setting: Setting) -> Iterator[dict[str, Any]]:
    """Two optimizers on two streams, and steps beside a matrix product: the bits of steps that run alone."""
    size = setting.few(8192, 8)
    factor = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    for beside in ("an optimizer", "a matrix product"):
        results = []
        for together in (False, True):
            pair = [setting.parameters(setting.shapes("124M"), torch.bfloat16) for _ in range(2)]
            optimizers = [_optimizer(parameters) for parameters in pair]
            for _ in range(setting.few(50)):
                if together:
                    with setting.another_stream(wait=False):
                        optimizers[1].step() if beside == "an optimizer" else factor @ factor
                elif beside == "an optimizer":
                    optimizers[1].step()
                    setting.synchronize()
                optimizers[0].step()
                setting.synchronize()
            results.append([x for o, parameters in zip(optimizers, pair, strict=True) for x in memory_of(o, parameters)])
        total = int(differing(*results))
        yield {"beside": beside, "elements_that_differed": total, "holds": total == 0}
        del pair, optimizers, results
        setting.clean_up()


def misaligned(setting: Setting) -> Iterator[dict[str, Any]]:
    """Update tensors at addresses that are not multiples of 16: the moments of aligned ones, bit for bit; and the time."""
    numels = setting.shapes("124M")
    reference, memories = None, []
    for offset in (0, 1):
        parameters = []
        for p in setting.parameters(numels, torch.bfloat16):
            moved = nn.Parameter(_moved(p.detach(), offset))
            moved.grad = _moved(p.grad, offset)
            parameters.append(moved)
        optimizer = AdamW(parameters, lr=1e-2, betas=BETAS, backend="triton")
        optimizer.step()
        memories = [x.clone() for x in memory_of(optimizer, parameters)]
        reference = memories if reference is None else reference
        total = int(differing(memories, reference))
        yield {
            "offset_elements": offset,
            "elements_that_differed": total,
            "device_ms": setting.device_ms(optimizer.step),
            "holds": total == 0,
        }


def _moved(tensor: Tensor | None, offset: int) -> Tensor:
    assert tensor is not None
    return torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)[offset:].copy_(tensor)


def beyond_32_bits(setting: Setting) -> Iterator[dict[str, Any]]:
    """Update a tensor of more than 2^31 elements: all elements are right, in each kind of launch."""
    n = setting.few(BEYOND, 1000)
    for optimizer_class, alone in itertools.product((AdamW, StableAdamW), (False, True)):
        p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=setting.device))
        p.grad = torch.full_like(p, 0.5)
        optimizer = optimizer_class([p], lr=0.25, betas=BETAS, weight_decay=0.0, compensation="none", backend="triton")
        if alone:
            update_alone(optimizer, p)
        else:
            optimizer.step()
        right = sum(int((x == 0.75).sum()) for x in p.detach().split(2**28))
        yield {"optimizer": optimizer_class.__name__, "alone": alone, "elements": n, "right": right, "holds": right == n}
        del p, optimizer
        setting.clean_up()


def sanitizer(setting: Setting) -> Iterator[dict[str, Any]]:
    """Run a small case under compute-sanitizer, where it is installed: no bad access, and no race in shared memory.

    PyTorch allocates every tensor by itself there: an access beyond a tensor is not one of its cached memory.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None or setting.dry:
        yield {"missing": "compute-sanitizer is not installed, or this is a dry run"}
        return
    script = [sys.executable, "-m", "benchmarks.gpu.one_step", "--small", "--programs", "1"]
    for check, options in CHECKS.items():
        command = [tool, "--tool", check, *options, "--error-exitcode", "9", *script]
        done = run_tool(command, 110, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        row: dict[str, Any] = {"tool": check, "status": done.status, "output": done.last_words}
        yield row | ({} if done.status is None else {"holds": done.status == 0})
