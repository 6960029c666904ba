"""The current device, its current stream, and whether a CUDA graph is being captured."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from triton.runtime import driver

from ....core.errors import UnsupportedTensorError
from .availability import interpreted


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a device is the current one, which is where Triton launches.

    Raises:
        UnsupportedTensorError: no kernel can run on the device: a parameter was added or moved after construction.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if not interpreted():
        raise UnsupportedTensorError(
            f"backend='triton' cannot update a parameter on {device}; move the model to a CUDA device, or construct the "
            "optimizer again with backend='auto'."
        )
    return contextlib.nullcontext()


def capturing(device: torch.device) -> bool:
    """Whether launches are being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """Return the number of the device's current stream without making a stream object; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    active: Any = driver.active
    return active.get_current_stream(device.index)
