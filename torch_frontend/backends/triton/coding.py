"""What a launch needs of slots that are rounded stochastically, or whose moments are in 8 bits, besides their `Operands`.

Random bits and blocks of 8-bit codes follow the rows of a tensor, so that these parameters must be contiguous.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.codings.eight_bit import BLOCK
from ....core.errors import UnsupportedTensorError
from ..backend import EXP_AVG, EXP_AVG_SQ, TensorSlot, scale_key

SCALES = (scale_key(EXP_AVG), scale_key(EXP_AVG_SQ))
SECOND_MOMENT = 2
"""The number of the second moment among the fields, as `TensorSlot.random` counts them."""


class Place(NamedTuple):
    """Where the elements of a slot's shard are in the whole tensor, and the key of its random bits.

    columns: length of a row; 0 without codes.
    first: index of the first element in the whole tensor.
    """

    columns: int
    first: int
    key: int


def place(slot: TensorSlot) -> Place:
    """Return the place of a slot."""
    return Place(_columns(slot), slot.first_index, slot.random_key or 0)


def positions(slot: TensorSlot) -> int:
    """Return the number of elements, with the last block of each row counted as a whole one if moments are in 8 bits."""
    numel = slot.parameter.numel()
    if not slot.coded or numel == 0:
        return numel
    columns = _columns(slot)
    return numel // columns * -(-columns // BLOCK) * BLOCK


def multiple_of_rows(slot: TensorSlot) -> int:
    """Return what the length of a row is a multiple of, as the kernels take it: 128, 16 or 1; 0 without codes."""
    return next((known for known in (BLOCK, 16, 1) if _columns(slot) % known == 0), 0) if slot.coded else 0


def _columns(slot: TensorSlot) -> int:
    return math.prod(slot.parameter.shape[1:]) if slot.coded else 0


def scales_of(slot: TensorSlot) -> list[Any]:
    """Return the scales of both moments, contiguous; None for one that is not in 8 bits.

    Raises:
        UnsupportedTensorError: they are on another device than the parameter, or those of another shape.
    """
    found: list[Any] = []
    for key in SCALES:
        scale = slot.state.get(key)
        if scale is not None:
            check_scale(slot, key, scale)
            if not scale.is_contiguous():
                slot.state[key] = scale.contiguous()
                scale = slot.state[key]
        found.append(scale)
    return found


def check_scale(slot: TensorSlot, key: str, scale: Tensor) -> None:
    """Raise `UnsupportedTensorError` unless there is a scale for each block of the parameter, on its device."""
    parameter = slot.parameter
    blocks = positions(slot) // BLOCK
    if scale.device != parameter.device or scale.numel() != blocks or scale.dtype is not torch.float32:
        raise UnsupportedTensorError(
            f"parameter of shape {tuple(parameter.shape)} on {parameter.device} needs {blocks} float32 scales there, and its "
            f"{key} has {scale.numel()} of dtype {scale.dtype} on {scale.device}; load a state_dict() of the model as it is "
            "now."
        )


def arguments_of(slot: TensorSlot) -> tuple[Any, ...]:
    """Return the arguments of `kernels.update_tensor` for random bits and scales; all numbers fit into an int32."""
    columns, index, key = place(slot)
    words = index >> 32, _as_int32(index & 0xFFFFFFFF), _as_int32(key)
    return (*scales_of(slot), columns, *words, update_number(slot), slot.state.get("microbatches", 0))


def update_number(slot: TensorSlot) -> int:
    """Return the number of this update, or 0 if it is on the device."""
    return 0 if slot.capturable else int(slot.step_number)


def _as_int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
