"""Settings and arrays of a case as PyTorch takes them, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.array_ops import numpy_dtype
from ...core.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = {"stable_adamw": "StableAdamW", "adamw": "AdamW", "adam": "Adam"}
"""Optimizers of the torch frontend by rule."""


def group_of(given: Hyperparameters) -> dict[str, Any]:
    """Hyperparameters as a torch parameter group spells them."""
    group = {
        "lr": given.learning_rate,
        "betas": (given.beta1, given.beta2),
        "eps": given.eps,
        "weight_decay": given.weight_decay,
    }
    return group | {"decouple_lr": True, "max_lr": given.max_lr} if given.decouple_lr else group


def to_torch(array: np.ndarray) -> Tensor:
    """A copy as a CPU tensor; bfloat16, which numpy and torch do not share, by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy as a numpy array of the same dtype."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(numpy_dtype("bfloat16"))
    return tensor.numpy().copy()
