"""Release and accumulation as a small pure state machine, and the ledger of gradient bytes alive."""

from .ledger import Ledger
from .machine import AFTER_ANOTHER_BACKWARD, Action, Decision, Event, GradientReady, Policy, Status, Step, ZeroGrad, decide

__all__ = [
    "AFTER_ANOTHER_BACKWARD",
    "Action",
    "Decision",
    "Event",
    "GradientReady",
    "Ledger",
    "Policy",
    "Status",
    "Step",
    "ZeroGrad",
    "decide",
]
