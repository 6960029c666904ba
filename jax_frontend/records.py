"""Records of updates, which penstock's transforms report through any chain or wrapper.

A chain of Optax hides what it consists of, and returns increments only. But it passes extra arguments on to each transform. One
of them may be a function: penstock's transforms call it with a `Record` of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax

from .arguments import Arguments

ARGUMENT = "penstock_record"
"""Name of the extra argument with the function."""


class Recorder:
    """The function: it keeps the records.

    in_turn: all gradients exist already, so that a parameter's update may wait for that of another one.
    """

    def __init__(self, in_turn: bool = False) -> None:
        self.records: list[Record] = []
        self.in_turn = in_turn

    def __call__(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)

    def __repr__(self) -> str:
        return ARGUMENT  # in the errors of what does not take it


class Source(NamedTuple):
    """The transform that a record comes from."""

    arguments: Arguments
    decays: bool  # weight decay applies to the parameter


class Record(NamedTuple):
    """What a transform did to one parameter."""

    path: jax.tree_util.KeyPath
    parameter: Any  # as the transform was given it; None without parameters
    increment: Any  # what the transform returns for it; None without a gradient
    new: Any  # the exact new parameter; None of scale_by_stable_adam, whose update is not added as it is
    compensated: bool  # the compensation in the new state is that of `new`
    source: Source | None = None  # None: of `compensated`


def recorder(extra_args: Mapping[str, Any]) -> Callable[[Record], None] | None:
    """Return the function among the extra arguments of an update, or None."""
    found = extra_args.get(ARGUMENT)
    return cast("Callable[[Record], None]", found) if callable(found) else None  # optax.partition may have replaced it
