"""How gradients are averaged over processes: one module per engine, all with the same few calls."""

from .protocol import Communication
from .selection import communication_name, select_communication

__all__ = ["Communication", "communication_name", "select_communication"]
