"""Whole event sequences of the release machine, each on every backend that can run them."""

from .protocol import EventRun, Resumable, RunsEvents
from .recorded import Backward, Discard, Event, EventCase, EventSequence, LearningRate, Step
from .section import Events

__all__ = [
    "Backward",
    "Discard",
    "Event",
    "EventCase",
    "EventRun",
    "EventSequence",
    "Events",
    "LearningRate",
    "Resumable",
    "RunsEvents",
    "Step",
]
