"""The backends: each has one definition of the step, and all obey `core.update`."""

from .backend import Backend, ChecksOnDevice, TensorSlot
from .selection import BACKENDS, select_backend

__all__ = ["BACKENDS", "Backend", "ChecksOnDevice", "TensorSlot", "select_backend"]
