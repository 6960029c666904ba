"""Release and accumulation as a small pure state machine, and the ledger of gradient bytes alive."""

from .ledger import Ledger
from .machine import Action, Decision, Event, GradientReady, Policy, Status, Step, ZeroGrad, decide

__all__ = [
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
