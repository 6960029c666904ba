"""The sections in the order in which they run, the most important first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import laws, speed, walk
from .setting import Setting

SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "soak": laws.soak,
    "bandwidth": speed.bandwidth,
    "step_time": speed.step_time,
    "graph": laws.graph,
    "release": speed.release,
    "one_tensor": laws.one_tensor,
    "beyond_32_bits": laws.beyond_32_bits,
    "configurations": speed.configurations,
    "jax": walk.jax_steps,
    "parity": laws.parity,
}

__all__ = ["SECTIONS", "Setting"]
