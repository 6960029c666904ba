"""The sections, in the order in which they run: what is right or wrong first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import laws, speed
from .setting import Setting

SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "soak": laws.soak,
    "one_tensor": laws.one_tensor,
    "beyond_32_bits": laws.beyond_32_bits,
    "bandwidth": speed.bandwidth,
    "step_time": speed.step_time,
    "graph": laws.graph,
    "configurations": speed.configurations,
    "release": speed.release,
    "parity": laws.parity,
}

__all__ = ["SECTIONS", "Setting"]
