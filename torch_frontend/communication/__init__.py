"""Averaging of gradients over processes: one module for each kind of model, all with the interface `Communication`."""

from .protocol import Communication
from .selection import communication_name, select_communication

__all__ = ["Communication", "communication_name", "select_communication"]
