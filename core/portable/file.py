"""The file of a portable state: `save`, `load`, and `describe`, which reads no arrays.

Of every parameter NAME the file has the tensors FIELD/NAME for each field of its rule ("exp_avg/NAME"), "step/NAME" (int64,
0-d), and where there are any "compensation/NAME", "parameter/NAME" and FIELD_scale/NAME, the scales of codes. The document says
the rest: the groups, each with its rule, and each parameter's dtype, shape and compensation. `core.portable.safetensors` has
the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..compensation import WITH_RANDOM_BITS
from ..errors import PenstockError
from ..rules import Rule
from .safetensors import Path, Reader, shown, write
from .state import (
    Layout,
    ParameterState,
    PortableGroup,
    PortableState,
    Setting,
    array_names,
    check_groups,
    rules_of,
    scale_name,
)


@dataclasses.dataclass(frozen=True)
class ParameterDescription:
    """The description of one parameter in a file.

    Args:
        dtype: of the parameter.
        shape: of the parameter.
        compensated: resolved, of `core.compensation`.
        step: updates so far.
        dtypes: of those arrays that the file has.
        random_keys: as in `ParameterState`.
    """

    dtype: str
    shape: tuple[int, ...]
    compensated: str
    step: int
    dtypes: Mapping[str, str]
    random_keys: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Description:
    """The content of a file without the arrays.

    Args:
        groups: as in `PortableState`.
        parameters: by name.
        nbytes: of the file.
    """

    groups: tuple[PortableGroup, ...]
    parameters: Mapping[str, ParameterDescription]
    nbytes: int


def save(path: Path, state: PortableState) -> None:
    """Write a state to a file. Equal states give equal bytes.

    The file is written in a temporary folder beside `path` (PATH.XXXXXXXX.tmp), brought to the disk and renamed, so that at
    every moment the old one or the new one is there, whole. A process that is killed can leave the folder behind.

    Args:
        path: of the file. What is there is replaced; a link is followed.
        state: to write.

    Raises:
        InvalidArgumentError: a name that is no Unicode text.
        RefusedError: it could not be written; what was there is as it was.
    """
    arrays = {f"step/{name}": np.asarray(parameter.step, np.int64) for name, parameter in state.parameters.items()}
    for name, parameter in state.parameters.items():
        arrays |= {f"{field}/{name}": array for field, array in parameter.arrays().items()}
    groups = [
        # The order of groups and of their parameters means nothing, and whether a number was typed as 1 or 1.0 neither.
        {
            "rule": group.rule,
            "hyperparameters": {name: _plain(value) for name, value in group.hyperparameters.items()},
            "parameters": sorted(group.parameters),
        }
        for group in sorted(state.groups, key=lambda group: sorted(group.parameters))
    ]
    parameters = {
        name: {
            "dtype": parameter.dtype,
            "shape": list(parameter.shape),
            "compensated": parameter.compensated,
            **(
                {"random_keys": list(parameter.random_keys)}
                if parameter.random_keys or parameter.compensated in WITH_RANDOM_BITS
                else {}
            ),
        }
        for name, parameter in state.parameters.items()
    }
    write(path, arrays, {"groups": groups, "parameters": parameters})


def load(path: Path) -> PortableState:
    """Read a state from a file. Names, shapes and dtypes are checked first, and each array against its digest.

    Args:
        path: of the file. Nothing in it is executed.

    Raises:
        InvalidArgumentError: it cannot be read, or is damaged, or is not a portable state; the text says how.
    """
    with Reader(path) as reader:
        about = _describe(reader)
        parameters = {
            name: ParameterState(
                parameter.dtype,
                parameter.shape,
                parameter.compensated,
                parameter.step,
                fields={},
                random_keys=parameter.random_keys,
            ).with_arrays(parameter.shape, {field: reader.read(f"{field}/{name}") for field in parameter.dtypes})
            for name, parameter in about.parameters.items()
        }
        try:
            return PortableState(about.groups, parameters)
        except PenstockError as error:
            reader.refuse(str(error).removesuffix("."))


def describe(path: Path) -> Description:
    """Return the description of a file. Only the step counts are read; other arrays are not checked.

    Args:
        path: of the file.

    Raises:
        InvalidArgumentError: as `load`, but for damage in the arrays.
    """
    with Reader(path) as reader:
        return _describe(reader)


def _plain(value: Setting) -> Setting:
    if isinstance(value, numbers.Real) and not isinstance(value, int):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _describe(reader: Reader) -> Description:
    """Return the header after checking that it is consistent and matches the arrays."""
    document = reader.document
    if set(document) != {"version", "digests", "groups", "parameters", *(["rule"] if document["version"] == 1 else [])}:
        reader.refuse("its document has other entries than those of its version")
    groups = tuple(_group(reader, group) for group in _kind(reader, "the groups", document["groups"], list))
    rows = _kind(reader, "the parameters", document["parameters"], dict)
    try:
        check_groups(groups, rows)
    except PenstockError as error:
        reader.refuse(str(error).removesuffix("."))
    rules = rules_of(groups)
    layouts = {name: _layout(reader, rules[name], name, row) for name, row in rows.items()}
    wanted = {f"{field}/{name}" for name, layout in layouts.items() for field in ("step", *layout.arrays)}
    if extra := sorted(set(reader.entries) - wanted):
        reader.refuse(f"it has an array {shown(extra[0])}, which belongs to no parameter of it")
    parameters = {}
    try:
        for name, layout in layouts.items():
            layout.check(name, rules[name])
    except PenstockError as error:
        reader.refuse(str(error).removesuffix("."))
    for name, layout in layouts.items():
        dtypes = {field: dtype for field, (dtype, _) in layout.arrays.items()}
        step = int(reader.read(f"step/{name}"))
        described = layout.dtype, layout.shape, layout.compensated, step, dtypes, layout.random_keys
        parameters[name] = ParameterDescription(*described)
    return Description(groups, parameters, reader.size)


def _kind(reader: Reader, what: str, value: Any, *kinds: type) -> Any:
    """Return `value`; raise if it is of another kind."""
    if type(value) not in kinds:
        reader.refuse(f"{what} cannot be {shown(value)}")
    return value


def _record(reader: Reader, what: str, value: Any, **kinds: type) -> list[Any]:
    """Return the entries of a JSON object; raise unless it has exactly these, each of its kind."""
    if set(_kind(reader, what, value, dict)) != set(kinds):
        reader.refuse(f"{what} cannot be {shown(value)}")
    return [_kind(reader, f"{name} of {what}", value[name], kind) for name, kind in kinds.items()]


def _group(reader: Reader, row: Any) -> PortableGroup:
    kinds = {"hyperparameters": dict, "parameters": list}
    if reader.document["version"] == 1:  # one rule for all groups
        rule = _kind(reader, "the rule", reader.document["rule"], str)
        hyperparameters, names = _record(reader, "a group", row, **kinds)
    else:
        rule, hyperparameters, names = _record(reader, "a group", row, rule=str, **kinds)
    for name in names:
        _kind(reader, "a parameter of a group", name, str)
    return PortableGroup(rule, hyperparameters, tuple(names))


def _layout(reader: Reader, rule: Rule, name: str, row: Any) -> Layout:
    """Return the dtypes and shapes of a parameter and of its arrays in the file."""
    what = f"parameter {shown(name)}"
    kinds = {"dtype": str, "shape": list, "compensated": str}
    if type(row) is dict and ("random_keys" in row or row.get("compensated") in WITH_RANDOM_BITS):
        kinds["random_keys"] = list
    dtype, shape, compensated, *keys = _record(reader, what, row, **kinds)
    for length in shape:
        _kind(reader, f"a length in the shape of {what}", length, int)
    found = {field: reader.entries.get(f"{field}/{name}") for field in ("step", *array_names(rule))}
    if (step := found.pop("step")) is None or (step.dtype, step.shape) != ("int64", ()):
        reader.refuse(f"{what} has no step, one int64")
    arrays = {field: (entry.dtype, entry.shape) for field, entry in found.items() if entry is not None}
    if reader.document["version"] < 3 and any(scale_name(field) in arrays for field in arrays):
        reader.refuse(
            f"{what} has 8-bit codes as of version {reader.document['version']}, which stood for other numbers; write it again "
            "with penstock convert --decode of the penstock that wrote it"
        )
    return Layout(dtype, tuple(shape), compensated, arrays, tuple(itertools.chain(*keys)))
