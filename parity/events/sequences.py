"""The named sequences, each about one thing that a training loop does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .recorded import LEARNING_RATE, Backward, Discard, Event, EventSequence, LearningRate, Step

STEP, DISCARD = Step(), Discard()
LOSS_SCALE = 2.0**10
MICRO_BATCHES = 4
SPIKE = 30.0
"""A factor of gradients that StableAdamW and a global norm of 1 clip."""


def _of(*tensors: str, **more: Any) -> Backward:
    return Backward(tensors, **more)


def _each(passes: Iterable[Backward]) -> tuple[Event, ...]:
    """A step() after each of them."""
    return tuple(event for backward in passes for event in (backward, STEP))


def _groups(groups: int, *, spike_in: int = -1) -> tuple[Event, ...]:
    """`MICRO_BATCHES` passes over all tensors, the last one marked, and step(); again and again."""
    found: list[Event] = []
    for group in range(groups):
        factor = SPIKE if group == spike_in else 1.0
        found += [Backward(factor=factor, last=number == MICRO_BATCHES - 1) for number in range(MICRO_BATCHES)]
        found.append(STEP)
    return tuple(found)


_HOLD, _WIDE, _STATE = ("adamw", "float32"), ("adam", "float64"), ("stable_adamw", "float32")
"""Other rules and dtypes than the default to compile for; few, so that sequences share programs."""

_ALL, _LAST = Backward(), Backward(last=True)

_UNUSED = (
    (_of("matrix", "vector"), _of("vector", "scalar"), _of("matrix", last=True), STEP),
    (_of("scalar"), _of("scalar", last=True), STEP),
    (_ALL, _LAST, STEP),
    (_of("vector", last=True), STEP),
    (_of("matrix", "scalar"), _of("vector", last=True), STEP),
)
"""Tensors without a gradient in some micro-batches, the last one among them, and in whole steps."""

_SHORT = (*_groups(1), _ALL, _ALL, STEP, _ALL, STEP, *_groups(1))
"""Groups that end before the micro-batch that would be the last."""

_OVERFLOW = (
    _ALL,
    Backward(nonfinite=("vector",)),
    _ALL,
    Backward(nonfinite=("scalar",)),
    Backward(nonfinite=("matrix", "scalar")),
    _ALL,
)

_NONFINITE_GROUPS = (
    (_ALL, _ALL, STEP),
    (Backward(nonfinite=("vector",)), _ALL, STEP),
    (_ALL, _of("matrix", "vector", nonfinite=("matrix",)), STEP),
    (_of("scalar", nonfinite=("scalar",)), STEP),
    (_ALL, STEP),
)


def _joined(groups: Iterable[Iterable[Event]]) -> tuple[Event, ...]:
    return tuple(event for group in groups for event in group)


SEQUENCES = (
    # the policies
    EventSequence("release", _each(Backward(factor=SPIKE if number == 4 else 1.0) for number in range(6))),
    EventSequence("hold", _groups(3, spike_in=2), accumulation="hold", compiled_for=_HOLD),
    EventSequence("hold-last-known", _groups(3, spike_in=2), accumulation="hold", last_known=True, compiled_for=_HOLD),
    EventSequence("state", _groups(3, spike_in=2), accumulation="state", compiled_for=_STATE),
    EventSequence("state-last-known", _groups(3, spike_in=2), accumulation="state", last_known=True),
    EventSequence(
        "pause",
        (
            *(Backward(paused=True), _ALL, STEP),  # one is added to the other
            *(Backward(paused=True), Backward(paused=True), STEP),
            *(_of("vector", paused=True), _of("matrix"), STEP),  # the one waits, the other is released
            *(_ALL, STEP),
        ),
    ),
    # parameters without a gradient, groups without their end, weights in two places
    EventSequence(
        "unused",
        _each([_of("matrix", "vector"), _of("vector", "scalar"), _ALL, _of("scalar"), _of("matrix"), _ALL]),
    ),
    EventSequence("unused-hold", _joined(_UNUSED), accumulation="hold", last_known=True, compiled_for=_HOLD),
    EventSequence("unused-state", _joined(_UNUSED), accumulation="state", last_known=True),
    EventSequence("short-hold", _SHORT, accumulation="hold", last_known=True, compiled_for=_HOLD),
    EventSequence("short-state", _SHORT, accumulation="state", last_known=True),
    EventSequence("tied", _each([_ALL] * 4), tied=True, compiled_for=_WIDE),
    EventSequence("tied-state", _groups(2), accumulation="state", tied=True, compiled_for=_WIDE),
    # between the steps
    EventSequence(
        "schedule",
        (
            *_each([_ALL, _ALL]),
            *(LearningRate(LEARNING_RATE / 2), _ALL, STEP),
            *(LearningRate(0.0), _ALL, STEP),
            *(LearningRate(2 * LEARNING_RATE), _ALL, STEP),
        ),
        compiled_for=_WIDE,
    ),
    EventSequence(
        "schedule-unused",  # an update with the same number as another, of another learning rate
        (_of("matrix"), STEP, LearningRate(LEARNING_RATE / 2), _of("vector", "scalar"), STEP, _ALL, STEP),
    ),
    EventSequence(
        "discard", (_ALL, _ALL, DISCARD, _ALL, _ALL, STEP, _ALL, DISCARD, _ALL, STEP), accumulation="hold", compiled_for=_HOLD
    ),
    # what needs the whole gradient
    EventSequence("clip", _each(Backward(factor=factor) for factor in (0.01, 1.0, SPIKE, 0.1, 1.0)), max_norm=1.0),
    EventSequence("clip-hold", _groups(3, spike_in=1), accumulation="hold", max_norm=1.0),
    EventSequence(
        "clip-each", _each(Backward(factor=factor) for factor in (0.01, 1.0, SPIKE, 0.1, 1.0)), max_norm=1.0, clips_each=True
    ),
    EventSequence("clip-each-hold", _groups(3, spike_in=1), accumulation="hold", max_norm=1.0, clips_each=True),
    EventSequence("overflow", _each(_OVERFLOW), loss_scale=LOSS_SCALE),
    EventSequence("overflow-clip", _each(_OVERFLOW), loss_scale=LOSS_SCALE, max_norm=1.0),
    # gradients that are not finite
    EventSequence("nonfinite", _each(_OVERFLOW), skips=True),
    EventSequence("nonfinite-hold", _joined(_NONFINITE_GROUPS), accumulation="hold", skips=True, compiled_for=_HOLD),
    EventSequence("nonfinite-state", _joined(_NONFINITE_GROUPS), accumulation="state", skips=True),
)
