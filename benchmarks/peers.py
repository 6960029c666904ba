"""Gradient release by others: PyTorch's tutorial, and optimi."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def release_in_torch_hooks(model: nn.Module, make: Callable[[list[Tensor]], Optimizer]) -> None:
    """Give each parameter an optimizer of its own, which is stepped in the parameter's hook.

    Source: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """
    optimizers: dict[Tensor, Optimizer] = {parameter: make([parameter]) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def optimi() -> ModuleType | None:
    """Return the package optimi, or None if it is not installed."""
    try:
        return importlib.import_module("optimi")
    except ModuleNotFoundError:
        return None


def optimi_optimizer(name: str, parameters: Any, **settings: Any) -> Optimizer:
    """Return an optimizer of optimi, without its Triton kernels, which need a GPU."""
    package = optimi()
    assert package is not None
    return getattr(package, name)(parameters, triton=False, **settings)


def release_by_optimi(model: nn.Module, name: str, **settings: Any) -> Optimizer:
    """Return optimi's optimizer of this name under its own gradient release."""
    package = optimi()
    assert package is not None
    optimizer = optimi_optimizer(name, model.parameters(), gradient_release=True, **settings)
    package.prepare_for_gradient_release(model, optimizer)
    return optimizer
