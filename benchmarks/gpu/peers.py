"""The optimizers that are compared, each with and without gradient release, and the bytes that a step of each moves."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.peers import plain_tensors, release_in_torch_hooks
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

from .setting import BETAS, Setting

Make = Callable[..., torch.optim.Optimizer]


class Candidate(NamedTuple):
    """An optimizer, without and with gradient release.

    make: takes the parameters. release: takes the model; returns the optimizer to step, or None if hooks do all of it.
    module: the package that must be there.
    """

    name: str
    make: Make
    release: Callable[[nn.Module], Any]
    module: str = "torch"

    @property
    def compiles(self) -> bool:
        """Whether the first step takes seconds for each shape of a tensor, for which torch.compile makes a program."""
        return self.module == "torchao.optim"


def candidates(setting: Setting) -> list[Candidate]:
    """Return this package's optimizers and the peers, constructed as in their documentation."""
    found = []
    for kind, compensation in ((AdamW, "none"), (StableAdamW, "split"), (AdamW, "split"), (StableAdamW, "none")):
        make = functools.partial(kind, lr=1e-4, betas=BETAS, compensation=compensation, backend="triton")
        found.append(Candidate(f"penstock {kind.__name__} {compensation}", make, functools.partial(_release, make)))
    found = found[: setting.few(4, 2)]
    fused = functools.partial(torch.optim.AdamW, lr=1e-4, betas=BETAS, fused=True)
    found.append(Candidate("torch AdamW(fused=True)", fused, functools.partial(_hooks, fused)))
    for name in ("AdamW", "StableAdamW"):
        make = functools.partial(_optimi, name, triton=not setting.dry)
        found.append(Candidate(f"optimi {name}", make, functools.partial(_release_optimi, make), "optimi"))
    for package, module, attribute in (
        ("FlashOptim", "flashoptim", "FlashAdamW"),
        ("torchao", "torchao.optim", "AdamW8bit"),
        ("torchao", "torchao.optim", "AdamW4bit"),
        ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
    ):
        make = functools.partial(_of, module, attribute)
        found.append(Candidate(f"{package} {attribute}", make, functools.partial(_hooks, make), module))
    return found


def _of(module: str, name: str, parameters: Any) -> torch.optim.Optimizer:
    return getattr(importlib.import_module(module), name)(parameters, lr=1e-4, betas=BETAS)


def _optimi(name: str, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return getattr(importlib.import_module("optimi"), name)(parameters, lr=1e-4, betas=BETAS, kahan_sum=False, **settings)


def _release(make: Make, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    release_gradients(model, optimizer)
    return optimizer


def _hooks(make: Make, model: nn.Module) -> None:
    release_in_torch_hooks(model, make)


def _release_optimi(make: Any, model: nn.Module) -> None:
    optimizer = make(model.parameters(), gradient_release=True)
    importlib.import_module("optimi").prepare_for_gradient_release(model, optimizer)


def missing(candidate: Candidate) -> str | None:
    """Return why a peer cannot be compared, with the remedy; None if it can."""
    try:
        importlib.import_module(candidate.module)
    except Exception as error:  # a peer may fail in any way when it is imported
        return f"{type(error).__name__}: {error}. Carry its wheel along: see README.md."
    return None


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step of this optimizer moves at least: g is read, p and all state are read and written."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            total += 3 * p.nbytes
            total += sum(2 * x.nbytes for value in optimizer.state[p].values() for x in plain_tensors(value) if x.numel() > 1)
    return total
