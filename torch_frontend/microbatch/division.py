"""Which tensors of a call hold the batch, and how it is divided into chunks."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Not public, but the one register of containers: packages enter their own output classes there.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...core.errors import InvalidArgumentError, RefusedError

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, functools.partial),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
"""Arguments that hold no batch: every chunk gets them as they are."""


@dataclasses.dataclass
class Division:
    """The arguments of one call, with the tensors taken out.

    tensors: the tensor arguments in order. batched: for each, whether it is divided along dimension 0. chunks: where.
    """

    tensors: list[Tensor]
    batched: list[bool]
    chunks: list[slice]
    _leaves: list[Any]  # of all arguments, None in the place of every tensor
    _places: list[int]  # of the tensors among the leaves
    _structure: TreeSpec

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments with other tensors, for instance those of one chunk."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._structure)

    def take_tensors(self) -> list[Tensor]:
        """The tensors, which are not held here afterwards: autograd holds what backward needs."""
        tensors, self.tensors = self.tensors, []
        return tensors


def divide(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int, batched: Collection[str] | None
) -> Division:
    """Divide a call's batch into `count` chunks whose sizes differ by one at most; fewer where the batch is smaller.

    Args:
        names: of the positional arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        count: of chunks, at least 1.
        batched: names of the arguments whose tensors hold the batch along dimension 0; None: the first tensor does, and
            every other one with as many entries there.

    Raises:
        InvalidArgumentError: `batched` names no argument, or one that is not of the batch's size.
        RefusedError: an argument of which it cannot be told whether it holds the batch.
    """
    leaves, structure = tree_flatten((args, dict(kwargs)))
    labels: list[str] = []
    for index, value in enumerate(args):
        label = names[index] if index < len(names) else f"number {index + 1}"
        labels += [label] * len(tree_flatten(value)[0])
    for label, value in kwargs.items():
        labels += [label] * len(tree_flatten(value)[0])
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    of_tensors = [labels[place] for place in places]
    if batched is None:
        for label, leaf in zip(labels, leaves, strict=True):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise RefusedError(
                    f"argument {label} of the block is a {type(leaf).__name__}, of which it cannot be told what each "
                    "micro-batch needs. Pass tensors (a cache of keys and values has no use in training: use_cache=False), "
                    "or name the arguments that hold the batch in microbatch_blocks(..., batched=...): others are passed whole."
                )
        divided, size = _by_size(of_tensors, tensors, count)
    else:
        divided, size = _by_name(labels, of_tensors, tensors, batched)
    pieces = max(1, min(count, size))
    bounds = [size * index // pieces for index in range(pieces + 1)]
    chunks = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Division(tensors, divided, chunks, rest, places, structure)


def _by_size(labels: Sequence[str], tensors: Sequence[Tensor], count: int) -> tuple[list[bool], int]:
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if first is None:
        raise RefusedError("the block was called without a tensor whose dimension 0 could hold the batch.")
    size = first.shape[0]
    divided = [tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors]
    if min(count, size) > 1:
        for label, tensor, its in zip(labels, tensors, divided, strict=True):
            if its and tensor.shape != first.shape and size in (*first.shape[1:], *tensor.shape[1:]):
                raise RefusedError(
                    f"argument {label} of the block has shape {tuple(tensor.shape)} where the batch is {size}, which is the "
                    "size of another dimension as well: it cannot be told whether its dimension 0 is the batch. Name the "
                    "arguments that hold the batch in microbatch_blocks(..., batched=...)."
                )
    return divided, size


def _by_name(
    all_labels: Sequence[str], labels: Sequence[str], tensors: Sequence[Tensor], batched: Collection[str]
) -> tuple[list[bool], int]:
    sizes = [tensor.shape[0] for label, tensor in zip(labels, tensors, strict=True) if label in batched and tensor.dim() > 0]
    if not sizes:
        raise InvalidArgumentError(
            f"batched={tuple(batched)!r} names no tensor that the block was called with; it got {', '.join(all_labels)}."
        )
    size = max(sizes)
    divided = []
    for label, tensor in zip(labels, tensors, strict=True):
        named = label in batched and tensor.dim() > 0
        if named and tensor.shape[0] not in (1, size):
            raise InvalidArgumentError(
                f"argument {label} of the block is named in batched=, but its dimension 0 is {tensor.shape[0]} where the "
                f"batch is {size}."
            )
        divided.append(named and tensor.shape[0] == size)
    return divided, size


@dataclasses.dataclass
class Outputs:
    """What one chunk of a block returned, with the tensors taken out."""

    tensors: list[Tensor]
    _leaves: list[Any]
    _places: list[int]
    _structure: TreeSpec

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The block's output with the tensors of the whole batch."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._structure)

    def without_tensors(self) -> Outputs:
        """How the output is put together, without the tensors."""
        return dataclasses.replace(self, tensors=[])

    def require_like(self, first: Outputs) -> None:
        """Raise `RefusedError` unless this is put together as the first chunk's output is."""
        if (self._structure, self._places) != (first._structure, first._places) or self._leaves != first._leaves:
            raise RefusedError("a block returned outputs of different structure for two chunks of one batch.")


def outputs_of(returned: Any, size: int, chunks: int) -> Outputs:
    """Take the tensors out of a chunk's output.

    Args:
        returned: by the block.
        size: of the chunk.
        chunks: how many there are; a single one may return anything.

    Raises:
        RefusedError: an output that cannot be put together from those of the chunks.
    """
    leaves, structure = tree_flatten(returned)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if chunks > 1:
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != size:
                raise RefusedError(
                    f"a block returned a tensor of shape {tuple(tensor.shape)} for a chunk of {size} samples: its dimension 0 "
                    "is not the batch, so that the chunks' outputs cannot be put together. Compute it outside of the block."
                )
        for leaf in rest:
            if not isinstance(leaf, _PLAIN):
                raise RefusedError(
                    f"a block returned a {type(leaf).__name__}, which cannot be put together from several chunks."
                )
    return Outputs(tensors, rest, places, structure)
