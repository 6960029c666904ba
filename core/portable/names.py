r"""Names of parameters: between this side's (dotted names of a module, paths of a pytree) and a file's.

A table goes from this side's name to the file's. "{layer}" stands for a number of a layer, in one name or in both:

    {"head.w": "lm_head.weight"}                         another name
    {"blocks.{layer}.w": "h.{layer}.weight"}             another name for that of every layer
    {"layers.w": "h.{layer}.weight"}                     here they are stacked along a leading axis, in the file not
    {"h.{layer}.weight": "layers.w"}                     the other way round
    {"head.w": Transposed("lm_head.weight")}             the file's array is this side's, transposed
    {"layers.w": Transposed("h.{layer}.weight", (1, 0))} and the same for that of every layer
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from .state import listed

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The file's name of a parameter that lies in the file transposed.

    Args:
        name: the file's name.
        axes: the file's array is this side's ``array.transpose(axes)``; None reverses all axes. A layer axis is not counted.
            (): it lies as it is, which of a square matrix may have to be said.
    """

    name: str
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgumentError(f"Transposed({self.name!r}) must have a name, a str.")
        if self.axes is None:
            return
        axes = tuple(self.axes) if isinstance(self.axes, tuple | list) else None
        if axes is None or not all(type(axis) is int for axis in axes) or sorted(axes) != list(range(len(axes))):
            raise InvalidArgumentError(f"axes={self.axes!r} of {self.name!r} must be a permutation of 0, 1, ..., a tuple.")
        object.__setattr__(self, "axes", axes)

    def backwards(self, name: str) -> Transposed:
        """What undoes it, under another name."""
        return Transposed(name, None if self.axes is None else tuple(int(axis) for axis in np.argsort(self.axes)))


Target = str | Transposed
Table = Mapping[str, Target]
Names = Table | Callable[[str], Target] | None
"""What users give: a table, a function from this side's names, or None for names that are equal."""


def table_of(names: Names, own: Iterable[str]) -> dict[str, Target]:
    """The table of the parameters that there are; those that keep their names are left out.

    Args:
        names: as users give them. A name that a table lacks is kept.
        own: this side's names.

    Raises:
        InvalidArgumentError: a name of the table that no parameter has, one that two lines give, or two that become one.
    """
    own = list(own)
    if names is None:
        return {}
    if not callable(names) and not isinstance(names, Mapping):
        raise InvalidArgumentError(f"names={names!r} must be a mapping of names to names, or a function of a name.")
    if callable(names):
        table = {name: _target(name, names(name)) for name in own}
        matched = {name: name for name in own}
    else:
        table, matched = {}, {}
        for key, target in names.items():
            _target(key, target)
            found = layers_of(key, own) if LAYER in key else {0: key} if key in own else {}
            if not found:
                close = difflib.get_close_matches(key, own, 1)
                there = f"; there are {listed(own, 3)}." if own else "; there are none."
                instead = f"; did you mean {close[0]!r}?" if close else there
                raise InvalidArgumentError(f"names has {key!r}, and no parameter is called so{instead}")
            for name in found.values():
                if name in matched:
                    raise InvalidArgumentError(f"names says twice what {name!r} becomes, under {matched[name]!r} and {key!r}.")
                matched[name] = key
            if LAYER in key and LAYER in name_of(target):
                table |= {name: _renamed(target, name_of(target).replace(LAYER, str(n))) for n, name in found.items()}
            else:
                table[key] = target
    kept = [name for name in own if name not in matched]
    refuse_equal([*kept, *map(name_of, table.values())])
    return {name: target for name, target in table.items() if target != name}


def inverted(table: Table) -> dict[str, Target]:
    """The table that leads back: from the file's names to this side's.

    Raises:
        InvalidArgumentError: two names become one, so that nothing leads back.
    """
    refuse_equal(map(name_of, table.values()))
    return {
        name_of(target): target.backwards(name) if isinstance(target, Transposed) else name for name, target in table.items()
    }


def parse_table(text: str) -> dict[str, Target]:
    """A table as JSON has it: {"own name": "file's name"} or {"own name": {"name": "file's name", "transposed": true}}.

    Args:
        text: of the JSON; "transposed" is true (all axes reversed), false (it lies as it is), or a list of axes.

    Raises:
        InvalidArgumentError: it is no such table.
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
    return {key: _parsed(key, value) for key, value in content.items()}


def _parsed(key: str, value: Any) -> Target:
    match value:
        case str():
            return value
        case {"name": str(name), "transposed": bool(transposed), **rest} if not rest:
            return Transposed(name, None if transposed else ())
        case {"name": str(name), "transposed": list(axes), **rest} if not rest and all(type(axis) is int for axis in axes):
            return Transposed(name, tuple(axes))
        case {"name": str(name), **rest} if not rest:
            return name
    raise InvalidArgumentError(
        f'the table gives {json.dumps(value)} for {key!r}; it must be a name, or {{"name": "...", "transposed": true}}, where '
        "a list of axes may stand for true."
    )


def name_of(target: Target) -> str:
    """The name of a table's entry, transposed or not."""
    return target.name if isinstance(target, Transposed) else target


def refuse_equal(names: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` if a name is there twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidArgumentError(f"names makes one of several parameters: {listed(twice)}; give them different ones.")


def _target(key: str, target: Any) -> Target:
    """`target`, if it can be one."""
    if not isinstance(key, str):
        raise InvalidArgumentError(f"names has {key!r}, which is no name; it must be a str.")
    if not isinstance(target, (str, Transposed)):
        raise InvalidArgumentError(f"names gives {target!r} for {key!r}; it must be a name, or Transposed(name).")
    for name in (key, name_of(target)):
        if name.count(LAYER) > 1:
            raise InvalidArgumentError(f"names has {name!r}; a name can have {LAYER} once.")
    return target


def _renamed(target: Target, name: str) -> Target:
    return dataclasses.replace(target, name=name) if isinstance(target, Transposed) else name


def layers_of(key: str, own: Iterable[str]) -> dict[int, str]:
    """The names that a name with "{layer}" stands for, by the layer's number, in order."""
    before, after = key.split(LAYER)
    pattern = re.compile(re.escape(before) + "(0|[1-9][0-9]*)" + re.escape(after))
    found = ((pattern.fullmatch(name), name) for name in own)
    return dict(sorted((int(match[1]), name) for match, name in found if match))
