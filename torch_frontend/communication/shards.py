"""Sharded tensors (DTensor): the local part, and sums over all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import UnsupportedTensorError

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that are not sharded: checked first, as most tensors are."""


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a DTensor. Its methods tell: importing DTensor would take a second."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process stores, in the same memory; an ordinary tensor as it is."""
    if type(tensor) in PLAIN:
        return tensor
    part = getattr(tensor, "_local_tensor", None)  # not public; to_local() makes a node of a graph, or a new parameter
    if part is not None or not is_sharded(tensor):
        return tensor if part is None else part
    with torch.no_grad():
        return tensor.to_local()


class Shard(NamedTuple):
    """How a process's part of a tensor belongs to the whole.

    Attributes:
        groups: process groups over which the tensor is sharded, one for each sharded dimension of its mesh.
        elements: number of elements of this part.
        whole_elements: number of elements of the tensor.
        whole: the tensor, a DTensor.
    """

    groups: tuple[Any, ...]
    elements: int
    whole_elements: int
    whole: Any


def shard_of(tensor: Any) -> Shard | None:
    """Describe this process's part of a DTensor; None for an ordinary tensor."""
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    sharded = [n for n, placement in enumerate(tensor.placements) if not placement.is_replicate()]  # strided ones, too
    groups = tuple(mesh.get_group(dimension) for dimension in sharded if mesh.size(dimension) > 1)
    return Shard(groups, local(tensor).numel(), tensor.numel(), tensor)


def rows_before(tensor: Any) -> int | None:
    """Return how many rows of a DTensor precede this process's part; None unless the part consists of neighbouring rows.

    Rows are along the first dimension, which is cut as torch.chunk cuts it, once for each sharded dimension of the mesh.
    """
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    before, rows = 0, tensor.shape[0] if tensor.dim() else 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(dimension) == 1:
            continue
        if not placement.is_shard(0) or hasattr(placement, "split_factor") or here is None:  # strided shards are interleaved
            return None
        length = -(-rows // mesh.size(dimension))
        start = min(length * here[dimension], rows)
        before, rows = before + start, min(length, rows - start)
    return before


def is_released(gradient: Any) -> bool:
    """Whether this is the marker of a released gradient, or a DTensor around one."""
    return gradient is not None and getattr(local(gradient), "released", False)


def distribute_like(like: Any, here: Tensor) -> Tensor:
    """Return a DTensor with the mesh, shape and placements of `like`, whose local part is `here`."""
    layout = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    distributed: Tensor = type(like).from_local(here, like.device_mesh, like.placements, **layout)
    return distributed


def with_rows_of(parameter: Any, whole: Tensor) -> Any:
    """Return zeros, 2-d with as many rows as a parameter, as a DTensor with its shards if it is one, otherwise as they are."""
    if not is_sharded(parameter):
        return whole
    here = whole.new_zeros((local(parameter).shape[0], whole.shape[1]))
    layout = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return type(parameter).from_local(here, parameter.device_mesh, parameter.placements, **layout)


def of_whole(shard: Shard | None, part: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this process's part of function(x), x being the tensor of whose shard `part` is; a collective where it is sharded.

    Every process with a part must call this for the same tensors in the same order. x is contiguous, so that sums over it have
    one order.
    """
    if shard is None:
        return function(part.contiguous())
    from torch.distributed.tensor import Replicate

    like = shard.whole
    sharded: Any = distribute_like(like, part)
    whole = function(sharded.full_tensor().contiguous())
    everywhere = [Replicate()] * like.device_mesh.ndim
    replicated = type(like).from_local(whole, like.device_mesh, everywhere, run_check=False)
    here: Tensor = local(replicated.redistribute(placements=like.placements))
    return here


def is_interleaved(tensor: Any) -> bool:
    """Whether a DTensor is sharded twice along one dimension (FSDP2 over tensor parallelism), as `of_whole` cannot cut it."""
    return any(hasattr(placement, "split_factor") for placement in placements(tensor) or ())


class LocalState(MutableMapping[str, Any]):
    """View of a parameter's state that shows a backend the local part of every tensor.

    Attributes:
        whole: the state itself.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole
        self._parts: dict[str, tuple[Any, Any]] = {}  # by key: a tensor and its local part

    def __getitem__(self, key: str) -> Any:
        tensor = self.whole[key]
        known = self._parts.get(key)
        if known is None or known[0] is not tensor:
            known = self._parts[key] = tensor, local(tensor)
        return known[1]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the local part, or `default` where there is no such key."""
        return self[key] if key in self.whole else default

    def __setitem__(self, key: str, value: Any) -> None:
        old: Any = self.whole.get(key)
        if is_sharded(old) and not is_sharded(value):  # a new local part of the same tensor
            value = distribute_like(old, value)
        self.whole[key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole[key]
        self._parts.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def placements(tensor: Any) -> tuple[Any, ...] | None:
    """The placements of a DTensor; None for an ordinary tensor."""
    return tuple(tensor.placements) if is_sharded(tensor) else None


def check_placements(tensor: Any, described: str) -> None:
    """Raise `UnsupportedTensorError` for a DTensor of partial sums."""
    if any(placement.is_partial() for placement in placements(tensor) or ()):
        raise UnsupportedTensorError(f"{described} is a DTensor of partial sums ({tensor.placements}); redistribute it first.")


def sum_over_shards(shards: Sequence[Shard | None], values: Sequence[Tensor]) -> list[Tensor]:
    """Add up 0-d sums over all parts of each tensor: one collective for each set of process groups.

    A collective adds up in an order that depends on what it takes together. float64 adds up float32 numbers of similar size
    without rounding, so that their sum does not depend on it. (That of a float64 parameter does, in its last bit.)

    Every process with a part must call this with the same tensors in the same order.

    Args:
        shards: of the tensors; for None, or a shard without groups, the value is returned as it is.
        values: values[i] is the sum over the part shards[i], 0-d.

    Returns:
        The sums, in order, each on the device of its value.
    """
    totals = list(values)
    together: dict[Any, list[int]] = {}
    for index, shard in enumerate(shards):
        if shard is not None and shard.groups:
            together.setdefault((shard.groups, values[index].dtype, values[index].device), []).append(index)
    for (groups, _, _), indices in together.items():
        found = torch.stack([values[index] for index in indices])
        sums = found.double()
        for group in groups:
            torch.distributed.all_reduce(sums, group=group)
        for index, total in zip(indices, sums.to(found.dtype).unbind(), strict=True):
            totals[index] = total
    return totals


def means_over_shards(shards: Sequence[Shard | None], means: Sequence[Tensor]) -> list[Tensor]:
    """Return the means of whole tensors from 0-d means over their parts. Arguments as for `sum_over_shards`.

    The mean of an empty part may be any finite number.
    """
    sharded = [(index, shard) for index, shard in enumerate(shards) if shard is not None and shard.groups]
    if not sharded:
        return list(means)
    # Lists of 0-d tensors: on a device, one launch for all of them, as in torch's own optimizers.
    elements = [shard.elements for _, shard in sharded]
    sums = torch._foreach_mul([means[index] for index, _ in sharded], elements)  # pyright: ignore[reportPrivateImportUsage]
    totals = sum_over_shards([shard for _, shard in sharded], sums)
    whole_elements = [max(1, shard.whole_elements) for _, shard in sharded]
    wholes = torch._foreach_div(totals, whole_elements)  # pyright: ignore[reportPrivateImportUsage]
    found = list(means)
    for (index, _), whole in zip(sharded, wholes, strict=True):
        found[index] = whole
    return found


def norms_over_shards(shards: Sequence[Shard | None], norms: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norms of whole tensors from 0-d norms of their parts."""
    if not any(shard is not None and shard.groups for shard in shards):
        return list(norms)
    return [square.sqrt() for square in sum_over_shards(shards, [norm.square() for norm in norms])]
