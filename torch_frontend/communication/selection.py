"""Which engine averages the gradients: chosen from what the parameters are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .local import LocalCommunication
from .protocol import Communication


def communication_name(model: nn.Module, process_group: Any = None) -> str:
    """The value of the axis "communication" in `core.combinations`."""
    if process_group is not None:
        return "process_group"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "ddp"
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "fsdp2"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "local" if torch.distributed.get_world_size() == 1 else "process_group"
    return "local"


def select_communication(model: nn.Module, process_group: Any = None) -> Communication:
    """The engine of that name."""
    return LocalCommunication()
