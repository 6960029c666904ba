"""The names of an optimizer's parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ...core.errors import InvalidArgumentError, RefusedError
from ..communication.selection import has_flat_parameters

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and the checkpoint wrapper put into names."""


def named_groups(optimizer: Optimizer, model: nn.Module) -> list[dict[str, Tensor]]:
    """The parameters of each group by their names in the model, as it is called without wrappers; a tied one has its first.

    Raises:
        InvalidArgumentError: the optimizer has a parameter that is not the model's.
        RefusedError: the model's parameters are not its own (FullyShardedDataParallel).
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"model={type(model).__name__} is not a torch.nn.Module; give the one whose parameters are optimized."
        )
    if has_flat_parameters(model):
        raise RefusedError("FullyShardedDataParallel flattens parameters; use torch.distributed.fsdp.fully_shard.")
    names = {parameter: _plain(name) for name, parameter in _inner(model).named_parameters()}
    if len(set(names.values())) < len(names):
        raise InvalidArgumentError(
            "two parameters of the model have one name when the names of wrappers are left out; rename one."
        )
    named = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise InvalidArgumentError(
                    f"a parameter of shape {tuple(parameter.shape)} of group {number} is not among model.named_parameters(); "
                    "give the model that this optimizer trains (after model.reshard(), if it is sharded and evaluated)."
                )
        named.append({names[parameter]: parameter for parameter in group["params"]})
    return named


def _inner(model: Any) -> nn.Module:
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in dict(model.named_children()):
            model = model._orig_mod
        else:
            return model


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
