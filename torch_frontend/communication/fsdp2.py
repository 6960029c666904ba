"""FSDP2 (`fully_shard`): it averages and scatters by itself, and calls the hooks with the shard that lies here."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from . import protocol
from .local import LocalCommunication
from .protocol import Deliver, Purpose


class FSDP2Communication(LocalCommunication):
    """Gathers the gradients of one FSDP2 parameter group, which come one after the other, and delivers them together.

    They lie in one buffer anyway, and what their updates need to know of the other shards (the mean square of StableAdamW,
    norms, finiteness) travels in one collective. Small groups wait for others, up to `BUCKET_BYTES`. What waits, or is not
    complete because a parameter was not used, is delivered when the next group has no room left, or the pass ends.
    """

    name = "fsdp2"

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._group_of: dict[int, tuple[Tensor, ...]] = {}  # by the id of each parameter in it
        self._arrived: list[Tensor] = []
        self._arriving: tuple[Tensor, ...] = ()  # the group that the last of them is of
        self._missing = 0  # of that group
        self._nbytes = 0  # of the groups that have arrived, all shards: the same on every process

    def attach(self, parameters: Sequence[Tensor], deliver: Deliver, purpose: Callable[[], Purpose]) -> None:
        super().attach(parameters, deliver, purpose)
        model = self._model()
        if model is not None:
            self._group_of = {id(parameter): group for group in parameter_groups(model) for parameter in group}

    def gradient_ready(self, parameter: Tensor) -> None:
        group = self._group_of.get(id(parameter)) or (parameter,)
        if group is not self._arriving:
            nbytes = sum(member.numel() * member.element_size() for member in group)
            if self._nbytes + nbytes > protocol.BUCKET_BYTES:
                self.flush()
            self._arriving, self._missing = group, len(group)
            self._nbytes += nbytes
        self._arrived.append(parameter)
        self._missing -= 1
        if not self._missing and self._nbytes >= protocol.BUCKET_BYTES:
            self.flush()

    def flush(self, *, always: bool = False) -> None:
        arrived = self._arrived
        self.detach()
        if arrived:
            self._deliver(arrived)

    def detach(self) -> None:
        self._arrived, self._arriving, self._nbytes = [], (), 0


def parameter_groups(model: nn.Module) -> list[tuple[Tensor, ...]]:
    """The trainable parameters, as FSDP2 handles them together.

    A parameter belongs to the innermost module around it that `fully_shard` was called on; modules that were given to it as
    one list share their state.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: Any = getattr(fsdp, "FSDPModule", ())
    members: dict[int, list[Tensor]] = {}
    seen: set[Tensor] = set()

    def walk(module: nn.Module, owner: int | None) -> None:
        if isinstance(module, sharded):
            state = getattr(module, "_get_fsdp_state", None)  # not public: without it, each module of a list counts by itself
            owner = id(module if state is None else state())
        for parameter in module.parameters(recurse=False):
            if owner is not None and parameter not in seen and parameter.requires_grad:
                seen.add(parameter)
                members.setdefault(owner, []).append(parameter)
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return [tuple(group) for group in members.values()]
