"""The backends: each implements the functions of `core.update` once, in place."""

from .backend import Backend, ChecksOnDevice, OverShards, TensorSlot, count_updates
from .selection import BACKENDS, select_backend

__all__ = ["BACKENDS", "Backend", "ChecksOnDevice", "OverShards", "TensorSlot", "count_updates", "select_backend"]
