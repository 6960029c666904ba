"""The backends: each implements the functions of `core.update` once, in place."""

from .backend import Backend, ChecksOnDevice, OverShards, TensorSlot
from .selection import BACKENDS, select_backend

__all__ = ["BACKENDS", "Backend", "ChecksOnDevice", "OverShards", "TensorSlot", "select_backend"]
