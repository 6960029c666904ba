"""The ways to train a PyTorch model that are compared: one row for each, for its memory, times, error and losses."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.peers import optimi_optimizer, release_by_flashoptim, release_by_optimi, release_in_torch_hooks
from benchmarks.support import failure
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

LR = 1e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = {"AdamW": AdamW, "StableAdamW": StableAdamW}
SMALLER = {"compact": "split8", "smallest": "none"}
"""What each precision keeps of the bits that bfloat16 parameters lose; "smallest" rounds stochastically and keeps none."""
BACKENDS = {"default": "auto", "eager": "eager", "compiled": "compiled"}


class Training(NamedTuple):
    """A model in training. close: the calls of the training loop after backward(). optimizers: those that it has."""

    close: Callable[[], None]
    optimizers: Sequence[Optimizer]


@dataclass(frozen=True)
class Method:
    """A way to train a model.

    make: takes parameters and lr, and if asked betas, eps and weight_decay; returns the optimizer.
    release: takes the model and `make`, and lets the backward pass update the parameters; returns the optimizers. None: it
    does not. closes: whether the loop calls step() and zero_grad() after backward().
    module: what has to be installed. dtypes: of the parameters.
    rule, suite, compensation: the rule that it computes; the backend of the parity suite that computes it in the same way,
    None if it has none; and what it keeps of the bits that bfloat16 parameters lose.
    """

    name: str
    make: Callable[..., Optimizer]
    release: Callable[[nn.Module, Callable[..., Optimizer]], list[Optimizer]] | None = None
    closes: bool = True
    module: str = "torch"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    rule: str = "adamw"
    suite: str | None = None
    compensation: str = "none"

    def attach(self, model: nn.Module, lr: float = LR) -> Training:
        """Make the optimizer of a model, and put it into the backward pass where this method does."""
        make = functools.partial(self.make, lr=lr)
        optimizers = [make(model.parameters())] if self.release is None else self.release(model, make)

        def close() -> None:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return Training(close if self.closes else lambda: None, optimizers)

    def missing(self) -> str | None:
        """Return why this method cannot run here; None if it can. Other libraries are tried with a step of two tensors."""
        return None if self.module in ("torch", "penstock") else _missing(self)


@functools.cache
def _missing(method: Method) -> str | None:
    try:
        importlib.import_module(method.module)
    except ModuleNotFoundError:
        return f"{method.module.partition('.')[0]} is not installed"
    except Exception as error:  # a peer may fail in any way when it is imported
        return failure(error)
    try:
        model = nn.Linear(64, 64)
        training = method.attach(model)
        model(torch.ones(2, 64)).sum().backward()
        training.close()
    except Exception as error:  # likewise, as where there is no GPU
        return failure(error)
    return None


def in_hooks(model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    """Give each parameter an optimizer in a hook, as PyTorch's tutorial does."""
    return release_in_torch_hooks(model, make)


def released(model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    """Put penstock's optimizer under its release."""
    optimizer = make(model.parameters())
    release_gradients(model, optimizer)
    return [optimizer]


def of(module: str, name: str) -> Callable[..., Optimizer]:
    """Return the constructor of another library's optimizer, which imports it when it is called."""
    return lambda parameters, **settings: getattr(importlib.import_module(module), name)(parameters, **settings)


def of_optimi(rule: str) -> list[Method]:
    """Return the methods of optimi; with Kahan summation for bfloat16 parameters."""
    make = functools.partial(optimi_optimizer, rule)
    row = functools.partial(Method, make=make, module="optimi", rule=_rule(rule), suite="optimi", compensation="kahan")
    return [row(f"optimi {rule} plain"), row(f"optimi {rule} release", release=release_by_optimi)]


def of_penstock(rule: str) -> list[Method]:
    """Return this package's methods on each backend."""
    found = []
    for name, release in (("plain", None), ("release", released)):
        for way, backend in BACKENDS.items():
            make = functools.partial(OPTIMIZERS[rule], backend=backend)
            suite = "compiled" if backend == "compiled" else "eager"
            found.append(
                Method(
                    f"penstock {rule} {name}, {way}",
                    make,
                    release,
                    module="penstock",
                    rule=_rule(rule),
                    suite=suite,
                    compensation="split",
                )
            )
    return found


def smaller(rule: str, precision: str, compensation: str) -> Method:
    """Return the method of a precision that keeps less than all bits."""
    make = functools.partial(OPTIMIZERS[rule], precision=precision)
    name = f"penstock {rule} release, {precision}"
    return Method(name, make, released, module="penstock", dtypes=("bf16",), rule=_rule(rule), compensation=compensation)


def _rule(name: str) -> str:
    return {"AdamW": "adamw", "StableAdamW": "stable_adamw"}[name]


IN_HOOKS, OURS = "torch AdamW fused in hooks", "penstock AdamW release, default"
FUSED = functools.partial(torch.optim.AdamW, fused=True)

METHODS = {
    method.name: method
    for method in (
        Method("torch AdamW fused plain", FUSED, suite="torch-fused"),
        Method("torch AdamW foreach plain", functools.partial(torch.optim.AdamW, foreach=True), suite="torch-foreach"),
        Method(IN_HOOKS, FUSED, in_hooks, closes=False, suite="torch-fused"),
        *of_optimi("AdamW"),
        *of_optimi("StableAdamW"),
        Method("FlashOptim AdamW release", of("flashoptim", "FlashAdamW"), release_by_flashoptim, module="flashoptim"),
        Method("torchao AdamW8bit plain", of("torchao.optim", "AdamW8bit"), module="torchao.optim"),
        Method("bitsandbytes AdamW8bit plain", of("bitsandbytes.optim", "AdamW8bit"), module="bitsandbytes.optim"),
        *of_penstock("AdamW"),
        *of_penstock("StableAdamW"),
        *(smaller("AdamW", precision, compensation) for precision, compensation in SMALLER.items()),
        Method(
            "penstock StableAdamW release, stochastic",
            functools.partial(StableAdamW, compensation="stochastic"),
            released,
            module="penstock",
            dtypes=("bf16",),
            rule="stable_adamw",
        ),
    )
}
"""By name. Another method is another row."""
