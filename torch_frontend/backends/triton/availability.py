"""Checks whether the Triton backend can run, with the remedy if it cannot."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ....core.rules import Rule, adam_family
from ...communication.shards import local
from ..memory_order import along_memory

OLDEST_CAPABILITY = (8, 0)
"""The lowest compute capability of an NVIDIA GPU that bfloat16 arithmetic and Triton support."""


def installed() -> bool:
    """Whether Triton can be imported; does not import it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules has a substitute without __spec__
        return False


def interpreted() -> bool:
    """Whether this process uses Triton's interpreter, which runs the kernels on a CPU, about a thousand times slower.

    Triton reads TRITON_INTERPRET when kernels are defined, so it must be set before they are imported. The interpreter
    truncates to bfloat16 where a GPU rounds; `correct_interpreter` of `parity.backends.triton_interpreter` corrects this.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def why_not(parameters: Iterable[Tensor], rule: Rule) -> str | None:
    """Return why the kernels cannot update these parameters by this rule, with the remedy; None if they can."""
    if not adam_family.is_member(rule):
        return f"there are no kernels for {rule.name}; use backend='compiled', 'eager' or 'auto'."
    if not installed():
        return "Triton is not installed; install it with: pip install triton, or use backend='auto'."
    devices = set()
    for parameter in parameters:
        devices.add(parameter.device)
        if not parameter.is_cuda and not (interpreted() and parameter.device.type == "cpu"):
            return (
                f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device.type}, and the kernels run on CUDA "
                "devices. Move the model to one before the optimizer is constructed, or use backend='compiled', 'eager' or "
                "'auto'. (For tests, a process that was started with TRITON_INTERPRET=1 runs them on the CPU, slowly; there "
                "penstock.parity.backends.triton_interpreter.correct_interpreter() makes bfloat16 round as on a GPU.)"
            )
        if not dense(parameter):
            return (
                f"a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} leaves gaps in memory or "
                "overlaps; make it dense (parameter.data = parameter.data.contiguous()), or use backend='eager'."
            )
    if torch.version.hip is None:
        for device in devices:
            if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
                return (
                    f"{device} has compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and the "
                    "kernels need 8.0 (Ampere) or newer; use backend='eager' or 'auto'."
                )
    return None


def why_not_in_rows(parameter: Tensor) -> str | None:
    """Return why a parameter can have no random bits and 8-bit codes in the kernels, with the remedy; None if it can."""
    if is_lazy(parameter) or local(parameter).is_contiguous():
        return None
    return (
        "the kernels have random bits and 8-bit codes of contiguous parameters only, and one of shape "
        f"{tuple(parameter.shape)} has strides {parameter.stride()}; make it contiguous (parameter.data = "
        "parameter.data.contiguous()), use backend='eager' or 'auto', or another compensation and state_dtype."
    )


def dense(parameter: Tensor) -> bool:
    """Whether the tensor is contiguous for some order of its dimensions."""
    return parameter.is_contiguous() or along_memory([parameter]) is not None
