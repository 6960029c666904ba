"""Tensors whose parts lie on several processes (DTensor): the part that is here, and sums over all parts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import UnsupportedTensorError

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that are no shard of another: most tensors, of which nothing more needs to be asked."""


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a DTensor. Asked of its methods: importing DTensor takes a second that most do not need."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Any:
    """The part of a tensor that lies on this process, the same memory; an ordinary tensor is its own."""
    if type(tensor) in PLAIN:
        return tensor
    part = getattr(tensor, "_local_tensor", None)  # not public; to_local() makes a node of a graph, or a new parameter
    if part is not None or not is_sharded(tensor):
        return tensor if part is None else part
    with torch.no_grad():
        return tensor.to_local()


class Shard(NamedTuple):
    """What a process's part of a tensor is of the whole.

    groups: the process groups over which the tensor is cut: one for each dimension of its mesh that it is cut along.
    elements: of this part. whole_elements: of the tensor.
    """

    groups: tuple[Any, ...]
    elements: int
    whole_elements: int


def shard_of(tensor: Any) -> Shard | None:
    """The part of a DTensor that this process stores; None for an ordinary tensor, which is stored whole."""
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    cut = [dimension for dimension, placement in enumerate(tensor.placements) if placement.is_shard()]
    groups = tuple(mesh.get_group(dimension) for dimension in cut if mesh.size(dimension) > 1)
    return Shard(groups, local(tensor).numel(), tensor.numel())


def is_released(gradient: Any) -> bool:
    """Whether this is what a released gradient has left in `.grad`, of a sharded parameter as well."""
    return gradient is not None and getattr(local(gradient), "released", False)


def placed_like(like: Any, here: Tensor) -> Tensor:
    """The DTensor on the mesh of `like`, of its shape and placements, whose local part this is."""
    layout = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    placed: Tensor = type(like).from_local(here, like.device_mesh, like.placements, **layout)
    return placed


class LocalState(MutableMapping[str, Any]):
    """A parameter's state as a backend sees it: of every tensor the part that this process stores.

    whole: the state itself.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole
        self._parts: dict[str, tuple[Any, Any]] = {}  # by key: a tensor, and the part of it that was asked for before

    def __getitem__(self, key: str) -> Any:
        tensor = self.whole[key]
        known = self._parts.get(key)
        if known is None or known[0] is not tensor:
            known = self._parts[key] = tensor, local(tensor)
        return known[1]

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        return self[key] if key in self.whole else default

    def __setitem__(self, key: str, value: Any) -> None:
        old: Any = self.whole.get(key)
        if is_sharded(old) and not is_sharded(value):  # laid out anew: the part of the same whole
            value = placed_like(old, value)
        self.whole[key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole[key]
        self._parts.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def placements(tensor: Any) -> tuple[Any, ...] | None:
    """How a DTensor lies on its mesh; None for an ordinary tensor."""
    return tuple(tensor.placements) if is_sharded(tensor) else None


def check_placements(tensor: Any, described: str) -> None:
    """Raise `UnsupportedTensorError` for a DTensor whose local part is neither a shard nor the whole."""
    if any(placement.is_partial() for placement in placements(tensor) or ()):
        raise UnsupportedTensorError(f"{described} is a DTensor of partial sums ({tensor.placements}); redistribute it first.")


def sum_over_shards(shards: Sequence[Shard | None], values: Sequence[Tensor]) -> list[Tensor]:
    """Of 0-d sums over parts of tensors, the sums over all parts: one collective for each set of process groups.

    Every process that holds a part must call this with parts of the same tensors in the same order.

    Args:
        shards: of tensors; None, or without groups: the whole tensor is here, and its value stays as it is.
        values: values[i] is over shards[i]; 0-d.

    Returns:
        The sums, in order, each on the device of its value.
    """
    totals = list(values)
    together: dict[Any, list[int]] = {}
    for index, shard in enumerate(shards):
        if shard is not None and shard.groups:
            together.setdefault((shard.groups, values[index].dtype, values[index].device), []).append(index)
    for (groups, _, _), indices in together.items():
        sums = torch.stack([values[index] for index in indices])
        for group in groups:
            torch.distributed.all_reduce(sums, group=group)
        for index, total in zip(indices, sums.unbind(), strict=True):
            totals[index] = total
    return totals


def means_over_shards(shards: Sequence[Shard | None], means: Sequence[Tensor]) -> list[Tensor]:
    """Of 0-d means over parts of tensors, the means over all parts; as `sum_over_shards`, a mean for a sum.

    A part may be empty: its mean is then any finite number.
    """
    cut = [(index, shard) for index, shard in enumerate(shards) if shard is not None and shard.groups]
    if not cut:
        return list(means)
    # As lists: a device would need a launch for every one of these numbers. (torch's optimizers do the same.)
    here = [shard.elements for _, shard in cut]
    sums = torch._foreach_mul([means[index] for index, _ in cut], here)  # pyright: ignore[reportPrivateImportUsage]
    totals = sum_over_shards([shard for _, shard in cut], sums)
    everywhere = [max(1, shard.whole_elements) for _, shard in cut]
    wholes = torch._foreach_div(totals, everywhere)  # pyright: ignore[reportPrivateImportUsage]
    found = list(means)
    for (index, _), whole in zip(cut, wholes, strict=True):
        found[index] = whole
    return found


def norms_over_shards(shards: Sequence[Shard | None], norms: Sequence[Tensor]) -> list[Tensor]:
    """Of the 2-norms of parts of tensors, 0-d, the norms of the whole tensors."""
    if not any(shard is not None and shard.groups for shard in shards):
        return list(norms)
    return [square.sqrt() for square in sum_over_shards(shards, [norm.square() for norm in norms])]
