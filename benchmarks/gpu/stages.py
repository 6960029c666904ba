"""The seven stages, in the order in which they are worth their time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from . import adversity, correctness, machine, neighbour, parity, ratios, training, walk
from .setting import Setting

Row = dict[str, Any]
"""One figure or verdict. "holds": False means that a law is broken."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A generator of rows, and the seconds after which it counts as hanging if no row has come."""

    run: Callable[[Setting], Iterator[Row]]
    stuck: int = 60


@dataclasses.dataclass(frozen=True)
class Stage:
    """Sections that share a time limit.

    seconds: no section of the stage goes on after them. stops: a broken law ends the run, and no later stage begins.
    """

    seconds: int
    sections: dict[str, Section]
    stops: bool = False


STAGES = {
    1: Stage(
        240,
        {
            "machine": Section(machine.machine),
            "steps": Section(correctness.steps),
            "repeats": Section(correctness.repeats),
        },
        stops=True,
    ),
    2: Stage(
        480,
        {
            "bandwidth": Section(ratios.bandwidth),
            "ways": Section(ratios.ways),
            "knobs": Section(ratios.knobs),
            "counters": Section(ratios.counters, 120),
        },
    ),
    3: Stage(
        300,
        {
            "graph": Section(adversity.graph),
            "soak": Section(adversity.soak),
            "streams": Section(adversity.streams),
            "misaligned": Section(adversity.misaligned),
            "beyond_32_bits": Section(adversity.beyond_32_bits),
            "sanitizer": Section(adversity.sanitizer, 120),
        },
    ),
    4: Stage(
        360,
        {
            "host": Section(training.host),
            "models": Section(training.models, 180),
            "optimizers": Section(training.optimizers, 180),
        },
    ),
    5: Stage(480, {"llama_8b": Section(neighbour.llama_8b, 120)}),
    6: Stage(480, {"steps": Section(walk.jax_steps, 180)}),
    7: Stage(
        480,
        {
            "one_tensor": Section(parity.one_tensor),
            "norms": Section(parity.norms),
            "parity": Section(parity.parity, 400),
        },
    ),
}
