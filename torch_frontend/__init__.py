"""PyTorch: a `torch.optim.Optimizer` family, and hooks that run its step inside the backward pass."""

from ..core.errors import not_installed

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise not_installed("penstock.torch_frontend", "PyTorch", "torch") from error

from .compatibility import (
    param_groups_weight_decay,
    prepare_for_gradient_release,
    remove_gradient_release,
    to_low_precision,
)
from .microbatch import MicrobatchedBlocks, microbatch_blocks
from .muon_groups import param_groups_for_muon
from .optimizers import SGD, Adam, AdamW, Adan, Lion, Muon, RAdam, Ranger, StableAdamW
from .portable import export_state, import_state
from .release import Release, release_gradients
from .token_mean import token_mean, total_weight

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Adan",
    "Lion",
    "MicrobatchedBlocks",
    "Muon",
    "RAdam",
    "Ranger",
    "Release",
    "StableAdamW",
    "export_state",
    "import_state",
    "microbatch_blocks",
    "param_groups_for_muon",
    "param_groups_weight_decay",
    "prepare_for_gradient_release",
    "release_gradients",
    "remove_gradient_release",
    "to_low_precision",
    "token_mean",
    "total_weight",
]
