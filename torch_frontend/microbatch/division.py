"""Division of a call's arguments into chunks along the batch, and the structure of its outputs."""

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

# Not public, but the registry of containers to which packages add their own output classes.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...core.errors import InvalidArgumentError, RefusedError

_NOT_BATCHED = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, functools.partial),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
"""Types of arguments that hold no batch: every chunk gets them unchanged."""


@dataclasses.dataclass
class Structure:
    """Nested containers whose tensors were taken out.

    leaves: all leaves in order, with None instead of each tensor. places: the positions of the tensors in them. containers:
    None for a tuple of nothing but tensors, which torch's pytree takes several times as long to take apart.
    """

    leaves: list[Any]
    places: list[int]
    containers: TreeSpec | None

    @classmethod
    def of(cls, tree: Any) -> tuple[Structure, list[Tensor]]:
        """Return the structure of a tree, and its tensors in order."""
        if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
            return cls([None] * len(tree), list(range(len(tree))), None), list(tree)
        leaves, containers = tree_flatten(tree)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(rest, places, containers), [leaves[place] for place in places]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tuple(leaves) if self.containers is None else tree_unflatten(leaves, self.containers)


@dataclasses.dataclass
class Division:
    """The arguments of one call, divided into chunks.

    structure: of all arguments, the positional ones first. keywords: names of the last ones. tensors: the tensor arguments in
    order. batched: for each of them, whether it is divided along dimension 0. chunks: the slices of the batch.
    """

    structure: Structure
    keywords: tuple[str, ...]
    tensors: list[Tensor]
    batched: list[bool]
    chunks: list[slice]

    def fill(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments, with these tensors."""
        values = self.structure.fill(tensors)
        positional = len(values) - len(self.keywords)
        return values[:positional], dict(zip(self.keywords, values[positional:], strict=True))

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors and drop the references to them: autograd saves what backward needs."""
        tensors, self.tensors = self.tensors, []
        return tensors


def divide(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int, batched: Collection[str] | None
) -> Division:
    """Divide a call's batch into `count` chunks whose sizes differ by at most one; into single samples if there are fewer.

    Args:
        names: of the positional arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        count: number of chunks, at least 1.
        batched: names of the arguments whose tensors hold the batch along dimension 0. None: the first tensor that is not
            0-d, and every other one of the same size in dimension 0.

    Raises:
        InvalidArgumentError: `batched` names no argument, or one whose size is not that of the batch.
        RefusedError: it cannot be decided whether an argument holds the batch.
    """
    structure, tensors = Structure.of((*args, *kwargs.values()))
    labels: list[str] = []  # for each leaf, the argument that it belongs to
    for index, value in enumerate(args):
        label = names[index] if index < len(names) else f"number {index + 1}"
        labels += [label] * _leaves(value)
    for label, value in kwargs.items():
        labels += [label] * _leaves(value)
    tensor_labels = [labels[place] for place in structure.places]
    if batched is None:
        for label, leaf in zip(labels, structure.leaves, strict=True):
            if not isinstance(leaf, _NOT_BATCHED):
                raise RefusedError(
                    f"argument {label} of the block is a {type(leaf).__name__}: it cannot be decided what each micro-batch "
                    "needs of it. Pass tensors (a cache of keys and values is of no use in training: use_cache=False), or name "
                    "the arguments that hold the batch in microbatch_blocks(..., batched=...): others are passed unchanged."
                )
        divided, size = _by_size(tensor_labels, tensors, count)
    else:
        divided, size = _by_name(labels, tensor_labels, tensors, batched)
    pieces = max(1, min(count, size))
    bounds = [size * index // pieces for index in range(pieces + 1)]
    chunks = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return Division(structure, tuple(kwargs), tensors, divided, chunks)


def _leaves(value: Any) -> int:
    return 1 if isinstance(value, Tensor) else len(tree_flatten(value)[0])


def _by_size(labels: Sequence[str], tensors: Sequence[Tensor], count: int) -> tuple[list[bool], int]:
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if first is None:
        raise RefusedError("the block was called without a tensor whose dimension 0 could hold the batch.")
    size = first.shape[0]
    divided = [tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors]
    if min(count, size) > 1:
        for label, tensor, its in zip(labels, tensors, divided, strict=True):
            vector = tensor.dim() == 1 < first.dim()  # one number a sample, or as many heads or positions as samples
            if its and tensor.shape != first.shape and (vector or size in (*first.shape[1:], *tensor.shape[1:])):
                raise RefusedError(
                    f"argument {label} of the block has shape {tuple(tensor.shape)} where the batch is {size}, which may be "
                    "the size of another dimension as well: it cannot be decided whether its dimension 0 is the batch. Name "
                    "the arguments that hold the batch in microbatch_blocks(..., batched=...)."
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


def outputs_of(returned: Any, size: int, chunks: int) -> tuple[Structure, list[Tensor]]:
    """Return the structure and the tensors of a chunk's output.

    Args:
        returned: what the block returned.
        size: samples in the chunk.
        chunks: number of chunks; with one, the block may return anything.

    Raises:
        RefusedError: the chunks' outputs cannot be concatenated.
    """
    structure, tensors = Structure.of(returned)
    if chunks > 1:
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != size:
                raise RefusedError(
                    f"a block returned a tensor of shape {tuple(tensor.shape)} for a chunk of {size} samples: its dimension 0 "
                    "is not the batch, so that the chunks' outputs cannot be put together. Compute it outside of the block."
                )
        for leaf in structure.leaves:
            if not isinstance(leaf, _NOT_BATCHED):
                raise RefusedError(
                    f"a block returned a {type(leaf).__name__}, which cannot be put together from several chunks."
                )
    return structure, tensors
