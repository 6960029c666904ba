"""Tensors whose parts lie on several processes (DTensor): the part that is here, and sums over all parts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UnsupportedTensor

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that are no shard of another: most tensors, of which nothing more needs to be asked."""


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a DTensor. Asked of its methods: importing DTensor takes a second that most do not need."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Any:
    """The part of a tensor that lies on this process, the same memory; an ordinary tensor is its own."""
    if type(tensor) in PLAIN:
        return tensor
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_released(gradient: Any) -> bool:
    """Whether this is what a released gradient has left in `.grad`, of a sharded parameter as well."""
    return gradient is not None and getattr(local(gradient), "released", False)


def placed_like(like: Any, here: Tensor) -> Tensor:
    """The DTensor on the mesh of `like`, of its shape and placements, whose local part this is."""
    layout = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    placed: Tensor = type(like).from_local(here, like.device_mesh, like.placements, **layout)
    return placed


class LocalState(MutableMapping[str, Any]):
    """A parameter's state as a backend sees it: of every tensor the part that lies here."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole

    def __getitem__(self, key: str) -> Any:
        return local(self._whole[key])

    def __setitem__(self, key: str, value: Any) -> None:
        old: Any = self._whole.get(key)
        if is_sharded(old) and not is_sharded(value):  # laid out anew: the part of the same whole
            value = placed_like(old, value)
        self._whole[key] = value

    def __delitem__(self, key: str) -> None:
        del self._whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def placements(tensor: Any) -> tuple[Any, ...] | None:
    """How a DTensor lies on its mesh; None for an ordinary tensor."""
    return tuple(tensor.placements) if is_sharded(tensor) else None


def check_placements(tensor: Any, described: str) -> None:
    """Raise `UnsupportedTensor` for a DTensor whose local part is neither a shard nor the whole."""
    if any(placement.is_partial() for placement in placements(tensor) or ()):
        raise UnsupportedTensor(f"{described} is a DTensor of partial sums ({tensor.placements}); redistribute it first.")


def sum_over_shards(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Of 0-d sums over the local parts of tensors, the sums over all parts: one collective for each set of meshes.

    Every process that holds a part must call this with the same tensors in the same order.

    Args:
        tensors: sharded or not; a value of one that is not stays as it is.
        values: values[i] is over the part of tensors[i] that lies here; 0-d.

    Returns:
        The sums, in order, each on the device of its value.
    """
    totals = list(values)
    together: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups = shard_groups(tensor)
        if groups:
            together.setdefault((*groups, values[index].dtype, values[index].device), []).append(index)
    for (*groups, _, _), indices in together.items():
        sums = torch.stack([values[index] for index in indices])
        for group in groups:
            torch.distributed.all_reduce(sums, group=group)
        for index, total in zip(indices, sums.unbind(), strict=True):
            totals[index] = total
    return totals


def means_over_shards(tensors: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
    """Of 0-d means over the local parts of tensors, the means over all parts; as `sum_over_shards`, a mean for a sum.

    A local part may be empty: its mean is then any finite number.
    """
    cut = [index for index, tensor in enumerate(tensors) if shard_groups(tensor)]
    if not cut:
        return list(means)
    # As lists: a device would need a launch for every one of these numbers. (torch's optimizers do the same.)
    here = [local(tensors[index]).numel() for index in cut]
    sums = torch._foreach_mul([means[index] for index in cut], here)  # pyright: ignore[reportPrivateImportUsage]
    totals = sum_over_shards([tensors[index] for index in cut], sums)
    everywhere = [max(1, tensors[index].numel()) for index in cut]
    wholes = torch._foreach_div(totals, everywhere)  # pyright: ignore[reportPrivateImportUsage]
    found = list(means)
    for index, whole in zip(cut, wholes, strict=True):
        found[index] = whole
    return found


def shard_groups(tensor: Any) -> tuple[Any, ...]:
    """The process groups over which a tensor's shards lie: one for each dimension of its mesh that it is cut along."""
    if not is_sharded(tensor):
        return ()
    mesh = tensor.device_mesh
    cut = [dimension for dimension, placement in enumerate(tensor.placements) if placement.is_shard()]
    return tuple(mesh.get_group(dimension) for dimension in cut if mesh.size(dimension) > 1)


def norms_over_shards(tensors: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
    """Of the 2-norms of the local parts, 0-d, the norms of the whole tensors."""
    if not any(shard_groups(tensor) for tensor in tensors):
        return list(norms)
    return [square.sqrt() for square in sum_over_shards(tensors, [norm.square() for norm in norms])]
