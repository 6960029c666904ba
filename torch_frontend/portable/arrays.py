"""Tensors as numpy arrays and back, bit for bit. The parts of a DTensor are gathered, and laid out again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.array_ops import numpy_dtype
from ..communication.shards import is_sharded, local, with_rows_of


def to_array(tensor: Tensor) -> np.ndarray:
    """All elements of a tensor, which may share its memory. Of a DTensor every process must ask."""
    here = _whole(tensor.detach()).cpu().contiguous()
    if here.dtype is torch.bfloat16:  # which numpy does not have
        return here.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return here.numpy()


def _whole(tensor: Any) -> Tensor:
    if not is_sharded(tensor):
        return tensor
    if tensor.dtype is torch.int16:  # no backend sends it
        return tensor.to(torch.int32).full_tensor().to(torch.int16)
    return tensor.full_tensor()


def _to_tensor(array: np.ndarray) -> Tensor:
    writable = np.require(array, requirements=["C", "W"])
    if writable.dtype.name == "bfloat16":
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def fill(tensor: Tensor, array: np.ndarray) -> None:
    """Write all elements; of a DTensor the part that lies here, and no process waits for another."""
    with torch.no_grad():
        local(tensor).copy_(_part(array, tensor))


def holds(tensor: Tensor, array: np.ndarray) -> bool:
    """Whether all elements are equal; of a DTensor those that lie here."""
    return torch.equal(local(tensor.detach()), _part(array, tensor).to(tensor.device))


def _part(array: np.ndarray, like: Any) -> Tensor:
    """Return the local part of a whole array, for a sharded tensor."""
    source = _to_tensor(array)
    if not is_sharded(like):
        return source
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(source.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()


def rows_like(parameter: Tensor, array: np.ndarray) -> Tensor:
    """A new tensor of an array with as many rows as the parameter, placed as that is."""
    made = with_rows_of(parameter, torch.empty(array.shape, dtype=_to_tensor(array).dtype, device=parameter.device))
    fill(made, array)
    return made


def laid_out_as(parameter: Tensor, array: np.ndarray) -> Tensor:
    """A new tensor of the array's dtype, placed as the parameter is: device, shards, a dense permuted layout."""
    dtype = _to_tensor(array[..., :0] if array.ndim else array).dtype
    made = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    fill(made, array)
    return made
