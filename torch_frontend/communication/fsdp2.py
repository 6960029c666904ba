"""FSDP2 (`fully_shard`): torch averages and scatters the gradients, and the hooks see the local shards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from . import protocol
from .local import LocalCommunication
from .protocol import Deliver, RoundKind


class FSDP2Communication(LocalCommunication):
    """Collects the gradients of an FSDP2 parameter group, which come one after the other, and delivers them together.

    FSDP2 stores them in one buffer, and one collective then sums what their updates need from all shards (the mean square of
    StableAdamW, norms, finiteness). Small groups are delivered together, up to `BUCKET_BYTES`. A group that stays incomplete,
    because a parameter was not used, is delivered with the next full bucket or when the pass ends.
    """

    name = "fsdp2"

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._group_of: dict[int, tuple[Tensor, ...]] = {}  # by the id of each parameter in the group
        self._ready: list[Tensor] = []
        self._current: tuple[Tensor, ...] = ()  # the group of the last gradient
        self._missing = 0  # gradients of the current group that have not come
        self._nbytes = 0  # of the collected groups, over all shards: the same on every process

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, round_kind: Callable[[], RoundKind]) -> None:
        super().attach(parameters, deliver, round_kind)
        model = self._model()
        if model is not None:
            self._group_of = {id(parameter): group for group in parameter_groups(model) for parameter in group}

    def gradient_ready(self, parameter: Tensor) -> None:
        group = self._group_of.get(id(parameter)) or (parameter,)
        if group is not self._current:
            nbytes = sum(member.numel() * member.element_size() for member in group)
            if self._nbytes + nbytes > protocol.BUCKET_BYTES:
                self.flush()
            self._current, self._missing = group, len(group)
            self._nbytes += nbytes
        self._ready.append(parameter)
        self._missing -= 1
        if not self._missing and self._nbytes >= protocol.BUCKET_BYTES:
            self.flush()

    def flush(self, *, always: bool = False) -> None:
        ready = self._ready
        self.detach()
        if ready:
            self._deliver(ready)

    def detach(self) -> None:
        self._ready, self._current, self._nbytes = [], (), 0


def _fsdp_module() -> Any:
    """Return the class of modules that fully_shard was called on; an empty tuple where nothing has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def has_fully_shard(model: nn.Module) -> bool:
    """Whether fully_shard was called on a part of the model."""
    return any(isinstance(module, _fsdp_module()) for module in model.modules())


def parameter_groups(model: nn.Module) -> list[tuple[Tensor, ...]]:
    """Return the trainable parameters in FSDP2's groups.

    A parameter belongs to the innermost module around it on which `fully_shard` was called; modules that were given as one
    list are one group.
    """
    sharded = _fsdp_module()
    members: dict[int, list[Tensor]] = {}
    seen: set[Tensor] = set()

    def walk(module: nn.Module, owner: int | None) -> None:
        if isinstance(module, sharded):
            state = getattr(module, "_get_fsdp_state", None)  # not public; without it each module of a list is a group
            owner = id(module if state is None else state())
        for parameter in module.parameters(recurse=False):
            if owner is not None and parameter not in seen and parameter.requires_grad:
                seen.add(parameter)
                members.setdefault(owner, []).append(parameter)
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return [tuple(group) for group in members.values()]
