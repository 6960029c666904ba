"""The tensors of one update, as the kernels get them: in the memory order of the parameter, on its device, of its size."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import UnsupportedTensorError
from ...communication.shards import PLAIN, local
from ..backend import TensorSlot
from .availability import dense

WIDEST = 16
"""Bytes of the widest access."""


class Operands(NamedTuple):
    """The tensors of one update, all in the memory order of the parameter.

    Where no gradient is needed, and where there is no compensation, the parameter stands for it.
    """

    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameter: Tensor
    compensation: Tensor


def operands(slot: TensorSlot, gradient: Tensor | None) -> Operands:
    """What the kernels get of a slot now. A sharded tensor is its local shard.

    A gradient that is laid out otherwise than its parameter is copied into the parameter's order, which needs the memory of
    a second gradient for the time of the launch. State that is (it came from a file) is laid out again, once.

    Raises:
        UnsupportedTensorError: the parameter has gaps in memory or overlaps.
    """
    parameter, state = slot.parameter, slot.state
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    compensated = slot.compensation != "none"
    compensation = state["compensation"] if compensated else parameter
    simple = type(parameter) in PLAIN and parameter.is_contiguous()
    if not (simple and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and compensation.is_contiguous()):
        parameter = local(parameter)
        check_dense(parameter)
        exp_avg, exp_avg_sq = _kept(state, "exp_avg", parameter), _kept(state, "exp_avg_sq", parameter)
        compensation = _kept(state, "compensation", parameter) if compensated else parameter
    if gradient is None:
        return Operands(parameter, exp_avg, exp_avg_sq, parameter, compensation)
    if not (simple and gradient.is_contiguous()):
        here: Tensor = local(gradient)
        gradient = here if alike(here, parameter) else in_order_of(parameter, here)
    if gradient.is_neg():
        gradient = gradient.resolve_neg()
    return Operands(gradient, exp_avg, exp_avg_sq, parameter, compensation)


def alignment(given: Sequence[Tensor], addresses: Sequence[int]) -> int:
    """Bytes that all five addresses are multiples of: those of the widest access, or only those of the narrowest element."""
    gradient, exp_avg, exp_avg_sq, parameter, compensation = addresses
    if (gradient | exp_avg | exp_avg_sq | parameter | compensation) % WIDEST == 0:
        return WIDEST
    return min(tensor.element_size() for tensor in given)


def check_operands(given: Operands) -> None:
    """Raise `UnsupportedTensorError` if not all of a parameter's tensors are on its device and of its size.

    A kernel would read, and write, other memory.
    """
    parameter = given.parameter
    device, numel = parameter.device, parameter.numel()
    for name, tensor in zip(Operands._fields, given, strict=True):
        if tensor.device != device:
            raise UnsupportedTensorError(
                f"parameter of shape {tuple(parameter.shape)} is on {device}, and its {name} on {tensor.device}; move "
                "the model before the first step, or load the optimizer's state_dict() after moving it."
            )
        if tensor.numel() != numel:
            raise _resized(name, tensor, parameter)


def check_dense(parameter: Tensor) -> None:
    """Raise `UnsupportedTensorError` for a parameter that the kernels cannot walk through."""
    if not dense(parameter):
        raise UnsupportedTensorError(
            f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} leaves gaps in memory or overlaps; "
            "make it dense (parameter.data = parameter.data.contiguous()), or use backend='eager'."
        )


def _kept(state: MutableMapping[str, Any], name: str, parameter: Tensor) -> Tensor:
    """The state of that name in the memory order of the parameter."""
    if not alike(local(state[name]), parameter):
        state[name] = in_order_of(parameter, local(state[name]), name)
    return local(state[name])


def _resized(name: str, tensor: Tensor, parameter: Tensor) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"parameter of shape {tuple(parameter.shape)} has {parameter.numel()} elements, and its {name} of shape "
        f"{tuple(tensor.shape)} has {tensor.numel()}: one of them was resized. Compute the gradient again, or load a "
        "state_dict() of the model as it is now."
    )


def alike(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the elements of both follow one another in memory in the same order, without gaps."""
    if tensor.shape != parameter.shape:
        return False
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return True
    strides = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(size <= 1 or mine == other for size, mine, other in strides)


def in_order_of(parameter: Tensor, tensor: Tensor, name: str = "gradient") -> Tensor:
    """A copy of a parameter's gradient or state in the memory order of the parameter."""
    if tensor.shape != parameter.shape:
        raise _resized(name, tensor, parameter)
    return torch.empty_like(parameter, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)
