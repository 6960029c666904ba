"""The functions of optimi, so that its users need to change only the import (https://optimi.benjaminwarner.dev)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InvalidArgumentError, RefusedError
from .releasable import ReleasableOptimizer
from .release import owner_of, release_leniently, remove_orphaned_hooks

Modules = type[nn.Module] | Iterable[type[nn.Module]] | None
NamesOrModules = str | type[nn.Module] | Iterable[str | type[nn.Module]] | None


def prepare_for_gradient_release(model: nn.Module, optimizer: ReleasableOptimizer, ignore_existing_hooks: bool = False) -> None:
    """Release the gradients of `model`: every backward is an update.

    Set `optimizer.optimizer_accumulation = True` before a backward to put its gradients into the moments only; the next
    backward without it completes the update. step() and zero_grad() have no effect on release and may be called at any time,
    or never. `release_gradients` is stricter, and notices mistakes.

    Args:
        model: holds the parameters.
        optimizer: constructed with gradient_release=True.
        ignore_existing_hooks: has no effect: hooks that are on the parameters stay, and run first.

    Raises:
        RefusedError: the optimizer was constructed without gradient_release=True, or a parameter is released already.
    """
    if isinstance(optimizer, ReleasableOptimizer) and not optimizer.gradient_release:
        raise RefusedError("the optimizer was constructed without gradient_release=True; construct it with it.")
    release_leniently(model, optimizer)


def remove_gradient_release(model: nn.Module) -> None:
    """Remove the release of `model`. Micro-batches that are in the moments are applied, so that none is lost.

    Raises:
        RefusedError: the gradients of this model are not released.
    """
    owners = {owner for owner in map(owner_of, model.parameters()) if owner is not None}
    found = [owner.optimizer.release for owner in owners if owner.hooks.model is model]
    if not remove_orphaned_hooks(model.parameters()) and not found:
        raise RefusedError("the gradients of this model are not released; there is nothing to remove.")
    for release in found:
        release.remove()


def param_groups_weight_decay(
    model: nn.Module, weight_decay: float = 1e-2, additional_layers: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Return two parameter groups: biases and normalisation weights without weight decay, all others with it.

    Args:
        model: its trainable parameters are grouped; those with at most one dimension, and those named "bias", do not decay.
        weight_decay: of the group that decays.
        additional_layers: parameters whose name contains one of these strings do not decay, either.

    Returns:
        The group without decay, then the group with it.
    """
    exempt = tuple(additional_layers or ())
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            bias = parameter.ndim <= 1 or name.rpartition(".")[2] == "bias"
            groups[not (bias or any(part in name for part in exempt))].append(parameter)
    return [{"params": groups[False], "weight_decay": 0.0}, {"params": groups[True], "weight_decay": weight_decay}]


def to_low_precision(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    fp32_modules: Modules = nn.Embedding,
    fp32_buffers: NamesOrModules = ("rope", "rotary"),
) -> nn.Module:
    """Cast a model to `dtype` in place, and some modules to float32. Call it before constructing the optimizer.

    Args:
        model: its floating-point parameters and buffers are cast; the same model is returned.
        dtype: bfloat16 or float16.
        device: move there as well.
        fp32_modules: modules of these classes keep parameters and buffers in float32.
        fp32_buffers: modules of these classes, or with one of these strings in their name, keep buffers in float32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidArgumentError(f"dtype={dtype} is not a low precision; it must be torch.bfloat16 or torch.float16.")
    whole = _module_types("fp32_modules", fp32_modules)
    several = () if fp32_buffers is None else (fp32_buffers,) if isinstance(fp32_buffers, (str, type)) else tuple(fp32_buffers)
    names = tuple(item.lower() for item in several if isinstance(item, str))
    buffers = _module_types("fp32_buffers", tuple(item for item in several if not isinstance(item, str)))
    for name, module in model.named_modules():
        keep = isinstance(module, whole)
        keep_buffers = keep or isinstance(module, buffers) or any(part in name.lower() for part in names)
        own = {id(parameter) for parameter in module.parameters(recurse=False)}

        def cast(tensor: Tensor, own: set[int] = own, keep: bool = keep, keep_buffers: bool = keep_buffers) -> Tensor:
            in_float32 = keep if id(tensor) in own else keep_buffers
            target = (torch.float32 if in_float32 else dtype) if tensor.is_floating_point() else None
            return tensor.to(device=device, dtype=target)

        module._apply(cast, recurse=False)
    return model


def _module_types(argument: str, given: Modules | NamesOrModules) -> tuple[type[nn.Module], ...]:
    types = () if given is None else (given,) if isinstance(given, type) else tuple(given)
    if not all(isinstance(item, type) and issubclass(item, nn.Module) for item in types):
        raise InvalidArgumentError(f"{argument}={given!r} must hold names or classes of torch.nn.Module.")
    return types  # type: ignore[return-value]
