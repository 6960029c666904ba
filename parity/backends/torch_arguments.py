"""Conversion of a case's settings and arrays to PyTorch, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.array_ops import numpy_dtype
from ...core.hyperparameters import Hyperparameters
from ...core.rules import RULES, Rule
from ..cases import Storage
from .protocol import Held, converted

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def class_of(rule: Rule) -> Any:
    """Return the optimizer of the torch frontend for a rule, or None."""
    from ... import torch_frontend

    for made in (getattr(torch_frontend, name) for name in torch_frontend.__all__):
        known = getattr(made, "rule", None)
        if known is not None and (known.name == rule.name or rule.is_of_one_kind_with(known)):
            return made
    return None


def optimizer_of(rule: Rule, parameters: Iterable[Any], given: Hyperparameters, storage: Storage, **more: Any) -> Any:
    """Return an optimizer of the torch frontend; `more` are its further arguments, such as the backend."""
    import torch

    made = class_of(rule)
    state_dtype = getattr(torch, str(storage.state_dtype), storage.state_dtype)  # "8bit" and None are not dtypes of torch
    optimizer = made(parameters, **group_of(given), compensation=storage.compensation, state_dtype=state_dtype, **more)
    if more.get("backend") == "compiled":
        optimizer._backend.small = 0  # the cases' tensors are small: they would be left to the eager backend
    return optimizer


def kept_by(optimizer: Optimizer, parameter: Any) -> dict[str, Tensor]:
    """Return the torch frontend's state of an updated parameter, by field of `Held`."""
    from ...torch_frontend.backends.backend import state_keys

    state, rule = optimizer.state[parameter], RULES[optimizer.param_groups[0]["rule"]]
    keys = {field.name: key for field, key in zip(rule.fields, state_keys(rule), strict=True)} | {
        "compensation": "compensation"
    }
    return {field: state[key] for field, key in keys.items() if key in state}


def held_of(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Held]:
    """The parameters of an optimizer of the torch frontend with what it keeps for them, in numpy."""
    return {
        name: converted({"parameter": parameter, **kept_by(optimizer, parameter)}, to_numpy)
        for name, parameter in named_parameters
    }


def group_of(given: Hyperparameters) -> dict[str, Any]:
    """Return hyperparameters with the names of a torch parameter group."""
    own = {name: getattr(given, name) for name in given.MEANINGS if not name.startswith("beta")}
    group = {"lr": given.learning_rate, "weight_decay": given.weight_decay, **own}
    if betas_of(given):
        group["betas"] = betas_of(given)
    return group | {"decouple_lr": True, "max_lr": given.max_lr} if given.decouple_lr else group


def betas_of(given: Hyperparameters) -> tuple[float, ...]:
    """Return beta1, beta2 and so on, of a rule that has them."""
    return tuple(getattr(given, name) for name in given.MEANINGS if name.startswith("beta"))


def to_torch(array: np.ndarray) -> Tensor:
    """Copy to a CPU tensor; bfloat16, which numpy and torch do not share, by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Copy to a numpy array of the same dtype."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(numpy_dtype("bfloat16"))
    return tensor.numpy().copy()
