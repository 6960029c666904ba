"""The choice of the communication, which follows from the model and its parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.errors import InvalidArgumentError, RefusedError
from .local import LocalCommunication
from .protocol import Communication
from .shards import is_sharded


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether a FullyShardedDataParallel has flattened parameters of the model."""
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return any(isinstance(module, fsdp1) for module in model.modules())


def communication_name(model: nn.Module, process_group: Any = None) -> str:
    """Return the value of the axis "communication" in `core.combinations`.

    Raises:
        InvalidArgumentError: a process_group that this process is not in, or for a model that brings its own.
        RefusedError: a wrapper that gradients cannot be released from.
    """
    if has_flat_parameters(model):
        raise RefusedError(
            "FullyShardedDataParallel flattens parameters, and gives no gradient until the whole backward is done. Use "
            "torch.distributed.fsdp.fully_shard."
        )
    own = "ddp" if isinstance(model, DistributedDataParallel) else None
    own = "fsdp2" if any(is_sharded(parameter) for parameter in model.parameters()) else own
    if own is not None and process_group is not None:
        its = "DistributedDataParallel" if own == "ddp" else "mesh"
        raise InvalidArgumentError(
            f"process_group is for a plain module; this one averages over the processes of its {its} already. Leave "
            "process_group out."
        )
    if own is not None:
        return own
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidArgumentError(
                "process_group, and torch.distributed is not initialised; call init_process_group first."
            )
        return "local"
    size = dist.get_world_size(process_group)
    if size < 1:
        raise InvalidArgumentError("process_group does not contain this process; release the model on its members only.")
    return "local" if size == 1 else "process_group"


def select_communication(
    model: nn.Module, parameters: Sequence[Tensor], settings: Callable[[], Mapping[str, Any]], process_group: Any = None
) -> Communication:
    """Return the communication of that name, after checking that it averages every gradient.

    Over a process group this is collective: every rank must call it.

    Args:
        model: as it is trained: wrapped in DistributedDataParallel, after fully_shard, or plain.
        parameters: those of the optimizer that require a gradient, in order.
        settings: returns numbers and strings by name, which must be the same on all processes of a process group.
        process_group: of a plain module; None: the default group, if torch.distributed is initialised.

    Raises:
        InvalidArgumentError, RefusedError: as `communication_name`; or a gradient that nobody would average, or initial values
            or settings that differ between ranks.
    """
    name = communication_name(model, process_group)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    outside = [parameter for parameter in parameters if parameter not in names]
    if outside and name != "local":
        raise RefusedError(
            f"optimizer has a parameter of shape {tuple(outside[0].shape)} outside this model, whose gradient nothing would "
            "average over the processes; use release_gradients on the module that holds all of them."
        )
    if name == "process_group":
        from .process_group import ProcessGroupCommunication, check_alike

        group = dist.group.WORLD if process_group is None else process_group
        check_alike(model, parameters, settings(), group)
        return ProcessGroupCommunication(group)
    if name == "ddp":
        from .ddp import DDPCommunication

        assert isinstance(model, DistributedDataParallel)
        _require_averaged_by_ddp(model, {names[parameter].removeprefix("module.") for parameter in parameters})
        return DDPCommunication(model)
    if name == "fsdp2":
        from .fsdp2 import FSDP2Communication, has_fully_shard

        plain = [parameter for parameter in parameters if not is_sharded(parameter)]
        if plain and has_fully_shard(model):  # under tensor parallelism alone, they are the same on all processes
            raise RefusedError(
                f"parameter {names[plain[0]]!r} is not sharded while others are: nothing averages its gradient. Call "
                "fully_shard on a module around it, or freeze it."
            )
        return FSDP2Communication(model)
    return LocalCommunication()


def _require_averaged_by_ddp(model: DistributedDataParallel, names: set[str]) -> None:
    ignored = names & set(model.parameters_to_ignore)
    if ignored:
        raise RefusedError(
            f"parameter {min(ignored)!r} is ignored by this DistributedDataParallel: nothing averages its gradient. Take it "
            "out of the parameters to ignore, or freeze it."
        )
    if model.mixed_precision is not None:
        raise RefusedError(
            "DistributedDataParallel(mixed_precision=...) computes gradients of copies of the parameters; use "
            "torch.autocast, or fully_shard with a MixedPrecisionPolicy."
        )
