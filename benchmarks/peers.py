"""Gradient release by others, and the tensors of which other libraries' states consist."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[..., Optimizer]
"""Takes the parameters, and returns the optimizer."""


def release_in_torch_hooks(model: nn.Module, make: Make) -> list[Optimizer]:
    """Give each parameter an optimizer of its own, which is stepped in the parameter's hook; return all of them.

    Source: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """
    optimizers: dict[Tensor, Optimizer] = {parameter: make([parameter]) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values())


def optimi() -> ModuleType | None:
    """Return the package optimi, or None if it is not installed."""
    try:
        return importlib.import_module("optimi")
    except ModuleNotFoundError:
        return None


def optimi_optimizer(name: str, parameters: Any, **settings: Any) -> Optimizer:
    """Return an optimizer of optimi without its Triton kernels, which need a GPU; with Kahan summation for bfloat16."""
    parameters = list(parameters)
    low = parameters[0].dtype is torch.bfloat16
    return getattr(importlib.import_module("optimi"), name)(parameters, triton=False, **{"kahan_sum": low, **settings})


def release_by_optimi(model: nn.Module, make: Make) -> list[Optimizer]:
    """Put an optimizer of optimi under its own gradient release."""
    optimizer = make(model.parameters(), gradient_release=True)
    importlib.import_module("optimi").prepare_for_gradient_release(model, optimizer)
    return [optimizer]


def release_by_flashoptim(model: nn.Module, make: Make) -> list[Optimizer]:
    """Put an optimizer of FlashOptim under its own gradient release."""
    optimizer = make(model.parameters())
    importlib.import_module("flashoptim").enable_gradient_release(model, optimizer)
    return [optimizer]


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of which a tensor, or an 8-bit one, consists."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
