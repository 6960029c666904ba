"""Tables of names: from the names of a module or pytree to those in a file.

Users give a function of a name, or a plain table. What it gives for a parameter is the file's name; a list of names where this
side stacks layers along a leading axis and the file has them one by one; either in `Transposed` where the file's array is
transposed. Where the file has the layers stacked, the key of the table is a tuple of names:

    {"head.w": "lm_head.weight"}                            another name
    {"head.w": Transposed("lm_head.weight")}                the file's array is this side's, transposed
    {"layers.w": ["h.0.weight", "h.1.weight"]}              stacked here, one by one in the file
    {"layers.w": Transposed(["h.0.weight", "h.1.weight"])}  and each of them transposed
    {("h.0.weight", "h.1.weight"): "layers.w"}              one by one here, stacked in the file
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from .state import listed


@dataclasses.dataclass(frozen=True)
class Transposed:
    """Name in the file of a parameter whose array is transposed there.

    Args:
        name: the file's name, or a list with the name of each layer.
        axes: the file's array is this side's ``array.transpose(axes)``; None reverses all axes. A layer axis is not counted.
            (): the array is as it is, which has to be declared of some square matrices.
    """

    name: str | Sequence[str]
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, (str, list, tuple)):
            raise InvalidArgumentError(f"Transposed({self.name!r}) must have a name, a str, or a list of the layers' names.")
        if self.axes is None:
            return
        axes = tuple(self.axes) if isinstance(self.axes, tuple | list) else None
        if axes is None or not all(type(axis) is int for axis in axes) or sorted(axes) != list(range(len(axes))):
            raise InvalidArgumentError(f"axes={self.axes!r} of {self.name!r} must be a permutation of 0, 1, ..., a tuple.")
        object.__setattr__(self, "axes", axes)


Target = str | Sequence[str] | Transposed
Names = Mapping[Any, Target] | Callable[[str], Target] | None
"""What users give: a table, a function from this side's names, or None for names that are equal."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a table: a parameter here and in the file.

    Args:
        own, file: its name; a tuple of the layers' names on the side that does not stack them.
        axes: as in `Transposed`.
        declared: whether the user said how the array is transposed.
    """

    own: str | tuple[str, ...]
    file: str | tuple[str, ...]
    axes: tuple[int, ...] | None = ()
    declared: bool = False


Table = Sequence[Line]
"""The lines of the parameters whose names, layers or axes differ; all others are equal on both sides."""


def each(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of one side of a line."""
    return names if isinstance(names, tuple) else (names,)


def line(own: Any, target: Any) -> Line:
    """Return one line of a table from the user's entry.

    Raises:
        InvalidArgumentError: it is not a name (or several) on either side, or layers on both.
    """
    name: Any = target.name if isinstance(target, Transposed) else target
    axes = target.axes if isinstance(target, Transposed) else ()
    here, file = (tuple(side) if isinstance(side, list) else side for side in (own, name))
    if not all(each(side) and all(isinstance(one, str) for one in each(side)) for side in (here, file)):
        raise InvalidArgumentError(
            f"names gives {target!r} for {own!r}; it must be a name, a list of the layers' names, or Transposed of these."
        )
    if isinstance(here, tuple) and isinstance(file, tuple):
        raise InvalidArgumentError(f"names gives several names for the layers {own!r}; give each layer a line of its own.")
    return Line(here, file, axes, isinstance(target, Transposed))


def table_of(names: Names, own: Iterable[str]) -> list[Line]:
    """Return the lines of these parameters; those that keep their names are left out.

    Args:
        names: as users give them. A name that a table lacks is kept.
        own: this side's names.

    Raises:
        InvalidArgumentError: a name of the table that no parameter has, one that two lines give, or two that become one.
    """
    own = list(own)
    if names is not None and not callable(names) and not isinstance(names, Mapping):
        raise InvalidArgumentError(f"names={names!r} must be a mapping of names to names, or a function of a name.")
    given = [] if names is None else [(name, names(name)) for name in own] if callable(names) else names.items()
    table = [line(name, target) for name, target in given]
    check(table, own)
    return [one for one in table if one.own != one.file or one.declared]


def check(table: Table, own: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` unless every parameter of the table exists once and all new names differ."""
    own = dict.fromkeys(own)
    counts = Counter(name for one in table for name in each(one.own))
    for name, count in counts.items():
        if name not in own:
            close = difflib.get_close_matches(name, own, 1)
            there = f"; there are {listed(list(own), 3)}." if own else "; there are none."
            instead = f"; did you mean {close[0]!r}?" if close else there
            raise InvalidArgumentError(f"names has {name!r}, and no parameter is called so{instead}")
        if count > 1:
            raise InvalidArgumentError(f"names says twice what {name!r} becomes; give it one line.")
    refuse_equal([*(name for name in own if name not in counts), *(name for one in table for name in each(one.file))])


def inverted(table: Table) -> list[Line]:
    """Return the inverse table: from the file's names to this side's.

    Raises:
        InvalidArgumentError: two names become one, so that nothing leads back.
    """
    refuse_equal(name for one in table for name in each(one.file))
    return [
        Line(one.file, one.own, one.axes and tuple(int(axis) for axis in np.argsort(one.axes)), one.declared) for one in table
    ]


def parse_table(text: str) -> list[Line]:
    """A table as JSON has it: {"own name": "file's name"} or {"own name": {"name": "file's name", "transposed": true}}.

    Args:
        text: of the JSON. A list of names is that of the layers. "transposed" is true (all axes reversed), false (as it is),
            or a list of axes.

    Raises:
        InvalidArgumentError: it is not such a table.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise InvalidArgumentError(f"the table has {listed(twice)} twice; an entry must be there once.")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=once)
    except InvalidArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the table is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError("the table must be a JSON object, of names to names.")
    return [line(key, _parsed(key, value)) for key, value in content.items()]


def _parsed(key: str, value: Any) -> Target:
    match value:
        case str() | list():
            return value
        case {"name": str() | list() as name, "transposed": bool(transposed), **rest} if not rest:
            return Transposed(name, None if transposed else ())
        case {"name": str() | list() as name, "transposed": list(axes), **rest} if not rest:
            return Transposed(name, tuple(axes))
        case {"name": str() | list() as name, **rest} if not rest:
            return name
    raise InvalidArgumentError(
        f'the table gives {json.dumps(value)} for {key!r}; it must be a name, or {{"name": "...", "transposed": true}}, where '
        "a list of axes may stand for true."
    )


def refuse_equal(names: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` if a name occurs twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidArgumentError(f"names makes one of several parameters: {listed(twice)}; give them different ones.")
