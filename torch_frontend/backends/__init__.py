"""The backends: each has one definition of the step, and all obey `core.update`."""

from .backend import Backend, ChecksOnDevice, OverShards, TensorSlot
from .selection import BACKENDS, select_backend

__all__ = ["BACKENDS", "Backend", "ChecksOnDevice", "OverShards", "TensorSlot", "select_backend"]
