"""The tensors of one update as the kernels take them: with the parameter's memory layout, device and size."""

from __future__ import annotations

import functools
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import UnsupportedTensorError
from ...communication.shards import PLAIN, local
from ..backend import EXP_AVG, EXP_AVG_SQ, TensorSlot
from .availability import dense, why_not_in_rows

ACCESS_BYTES = 16
"""Bytes of the widest memory access."""

NOTHING_KEPT = ("none", "stochastic")
"""Compensations that keep nothing beside the parameter."""

LARGE = 2**16
"""Least number of elements of a tensor whose slow update is worth a warning."""


class Operands(NamedTuple):
    """The tensors of one update, all with the parameter's memory layout.

    The parameter itself takes the place of a gradient or compensation that is not needed.
    """

    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameter: Tensor
    compensation: Tensor


def operands(slot: TensorSlot, gradient: Tensor | None) -> Operands:
    """Return the tensors of a slot for the kernels; for a sharded tensor its local shard.

    A gradient with another layout than the parameter's is copied, which takes the memory of a second gradient during the
    launch. State with another layout (from a file) is replaced by a copy in the parameter's, once.

    Raises:
        UnsupportedTensorError: the parameter has gaps in memory or overlaps.
    """
    parameter, state = slot.parameter, slot.state
    exp_avg, exp_avg_sq = state[EXP_AVG], state[EXP_AVG_SQ]
    compensated = slot.compensation not in NOTHING_KEPT
    compensation = state["compensation"] if compensated else parameter
    simple = type(parameter) in PLAIN and parameter.is_contiguous()
    if not (simple and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and compensation.is_contiguous()):
        parameter = local(parameter)
        check_dense(parameter)
        if slot.random and (why := why_not_in_rows(parameter)) is not None:
            raise UnsupportedTensorError(why)
        exp_avg, exp_avg_sq = _state_in_layout(state, EXP_AVG, parameter), _state_in_layout(state, EXP_AVG_SQ, parameter)
        compensation = _state_in_layout(state, "compensation", parameter) if compensated else parameter
    if gradient is None:
        return Operands(parameter, exp_avg, exp_avg_sq, parameter, compensation)
    if not (simple and gradient.is_contiguous()):
        here: Tensor = local(gradient)
        gradient = here if same_layout(here, parameter) else copied_to_layout_of(parameter, here)
    if gradient.is_neg():
        gradient = gradient.resolve_neg()
    return Operands(gradient, exp_avg, exp_avg_sq, parameter, compensation)


def alignment(given: Sequence[Tensor], addresses: Sequence[int]) -> int:
    """Return bytes that all five addresses are multiples of: `ACCESS_BYTES`, or else those of the narrowest element."""
    gradient, exp_avg, exp_avg_sq, parameter, compensation = addresses
    if (gradient | exp_avg | exp_avg_sq | parameter | compensation) % ACCESS_BYTES == 0:
        return ACCESS_BYTES
    for name, tensor, address in zip(Operands._fields, given, addresses, strict=True):
        if address % ACCESS_BYTES and tensor.numel() >= LARGE:
            _warn_misaligned(name, tuple(tensor.shape))
    return min(tensor.element_size() for tensor in given)


@functools.cache
def _warn_misaligned(name: str, shape: tuple[int, ...]) -> None:
    """Warn, once for each name and shape."""
    warnings.warn(
        f"the {name} of shape {shape} is at an address that is not a multiple of {ACCESS_BYTES} bytes, which makes its "
        "update slower: it is a part of a larger tensor. Clone it, or begin the parts at multiples of 16 bytes.",
        stacklevel=2,
    )


def check_operands(given: Operands) -> None:
    """Raise `UnsupportedTensorError` unless all tensors have the parameter's device and size.

    Otherwise a kernel would access memory outside of them.
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
    """Raise `UnsupportedTensorError` for a parameter that is not dense."""
    if not dense(parameter):
        raise UnsupportedTensorError(
            f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} leaves gaps in memory or overlaps; "
            "make it dense (parameter.data = parameter.data.contiguous()), or use backend='eager'."
        )


def _state_in_layout(state: MutableMapping[str, Any], name: str, parameter: Tensor) -> Tensor:
    """Return the state of this name, after replacing it by a copy in the parameter's layout if it has another one."""
    if not same_layout(local(state[name]), parameter):
        state[name] = copied_to_layout_of(parameter, local(state[name]), name)
    return local(state[name])


def _resized(name: str, tensor: Tensor, parameter: Tensor) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"parameter of shape {tuple(parameter.shape)} has {parameter.numel()} elements, and its {name} of shape "
        f"{tuple(tensor.shape)} has {tensor.numel()}: one of them was resized. Compute the gradient again, or load a "
        "state_dict() of the model as it is now."
    )


def same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has the shape and the memory layout of a dense parameter."""
    if tensor.shape != parameter.shape:
        return False
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return True
    strides = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(size <= 1 or mine == other for size, mine, other in strides)


def copied_to_layout_of(parameter: Tensor, tensor: Tensor, name: str = "gradient") -> Tensor:
    """Return a copy of a parameter's gradient or state in the parameter's memory layout. name: for the error message."""
    if tensor.shape != parameter.shape:
        raise _resized(name, tensor, parameter)
    return torch.empty_like(parameter, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)
