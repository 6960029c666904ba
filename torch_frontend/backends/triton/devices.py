"""What a launch asks torch about a device: to make it the current one, its current stream, and whether a graph is captured."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from triton.runtime import driver

from ....core.errors import UnsupportedTensorError
from .availability import interpreted


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches.

    Raises:
        UnsupportedTensorError: a parameter is (added, or moved since the optimizer was constructed) where no kernel can run.
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
    """The number of the device's current stream, as Triton asks for it; 0 in the interpreter. No stream object is made."""
    if device.type != "cuda":
        return 0
    active: Any = driver.active
    return active.get_current_stream(device.index)
