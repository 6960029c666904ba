"""Gradient release as others do it: PyTorch's tutorial, and optimi."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def release_in_torch_hooks(model: nn.Module, make: Callable[[list[Tensor]], Optimizer]) -> None:
    """One optimizer a parameter, stepped in the parameter's own hook.

    Source: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """
    optimizers: dict[Tensor, Optimizer] = {parameter: make([parameter]) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def optimi() -> ModuleType | None:
    """The package optimi, or None where it is not installed."""
    try:
        return importlib.import_module("optimi")
    except ModuleNotFoundError:
        return None


def optimi_optimizer(name: str, parameters: Any, **settings: Any) -> Optimizer:
    """An optimizer of optimi's without its Triton kernels, which are for GPUs."""
    package = optimi()
    assert package is not None
    return getattr(package, name)(parameters, triton=False, **settings)


def release_by_optimi(model: nn.Module, name: str, **settings: Any) -> Optimizer:
    """optimi's optimizer of that name, stepped in hooks by its own gradient release."""
    package = optimi()
    assert package is not None
    optimizer = optimi_optimizer(name, model.parameters(), gradient_release=True, **settings)
    package.prepare_for_gradient_release(model, optimizer)
    return optimizer
