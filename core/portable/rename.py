"""Renames the parameters of a portable state, stacks or splits layers, and transposes arrays, by a table of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from ..random_bits import layer_keys
from .names import Line, Table, check, each, inverted
from .state import CODES, ParameterState, PortableGroup, PortableState, array_names, listed

OUTPUT_AXIS = "output_axis"
"""A hyperparameter of Muon that depends on how a matrix is transposed."""

CONVENTIONS = (("kernel", "weight"), ("weight", "kernel"))
"""Last parts of names of which one side's array is transposed: flax has kernels [in, out], torch weights [out, in]."""


def rename(state: PortableState, table: Table) -> PortableState:
    """The state under the names of the file; with `inverted(table)` a state under the file's names, under this side's.

    Nothing is copied but what is stacked.

    Args:
        state: under this side's names.
        table: as `table_of` makes it.

    Raises:
        InvalidArgumentError: as `table_of`; layers that cannot be stacked, or a parameter that has not these layers or axes; a
            square matrix of which it has to be declared how it is transposed.
    """
    check(table, state.parameters)
    if not table:
        return state
    there = {name for line in table for name in each(line.own)}
    table = [*table, *(Line(name, name) for name in state.parameters if name not in there)]
    usual = _usually_transposed(table)
    becomes: dict[str, list[tuple[str, ParameterState]]] = {name: [] for name in state.parameters}
    for line in table:
        parts = [state.parameters[name] for name in each(line.own)]
        if isinstance(line.own, tuple):
            _check_stackable(line.own, state)
        elif isinstance(line.file, tuple):
            parts = _unstacked(line, parts[0])
        parts = [_transposed(part, line, usual) for part in parts]
        if isinstance(line.own, tuple):
            parts = [_stacked(parts)]
        becomes[each(line.own)[0]] = list(zip(each(line.file), parts, strict=True))  # that of stacked layers is the first's
    turned = {name for line in table for name in each(line.own) if _swaps(line.axes)}
    groups = [
        dataclasses.replace(part, parameters=tuple(new for name in part.parameters for new, _ in becomes[name]))
        for group in state.groups
        for part in _by_output_axis(group, turned)
    ]
    return PortableState(tuple(groups), {new: part for parts in becomes.values() for new, part in parts})


def rename_back(state: PortableState, table: Table) -> PortableState:
    """Return the state with this side's names from one with the file's: the inverse of `rename`.

    Args:
        state: under the file's names.
        table: of this side's names, as `table_of` makes it.

    Raises:
        InvalidArgumentError: as `rename`; the state lacks what the table leads to.
    """
    back = inverted(table)
    lacking = {name: line.file for line in back for name in each(line.own) if name not in state.parameters}
    if lacking:
        here = list(dict.fromkeys(name for own in lacking.values() for name in each(own)))
        raise InvalidArgumentError(
            f"the state lacks {listed(list(lacking), 3)} (here {listed(here, 3)}); it has "
            f"{listed(list(state.parameters), 3)}; give names= to say how the parameters are called in the file."
        )
    return rename(state, back)


def is_square(shape: tuple[int, ...]) -> bool:
    """Whether a shape, without layers, is the same with all axes reversed and has at least two dimensions."""
    return len(shape) > 1 and shape == shape[::-1] and min(shape) > 0 and max(shape) > 1


def _swaps(axes: tuple[int, ...] | None) -> bool:
    """Whether these axes of a `Line` transpose a matrix."""
    return axes is None or axes == (1, 0)


def _by_output_axis(group: PortableGroup, turned: Collection[str]) -> list[PortableGroup]:
    """Return a group's parameters in up to two groups: in transposed matrices the other axis counts Muon's outputs."""
    axis = group.hyperparameters.get(OUTPUT_AXIS)
    kept, others = ([name for name in group.parameters if (name in turned) is turns] for turns in (False, True))
    if not isinstance(axis, int) or not others:
        return [group]
    other = dataclasses.replace(
        group, hyperparameters={**group.hyperparameters, OUTPUT_AXIS: 1 - axis}, parameters=tuple(others)
    )
    return [*([dataclasses.replace(group, parameters=tuple(kept))] if kept else []), other]


def _check_stackable(layers: Sequence[str], state: PortableState) -> None:
    """Raise `InvalidArgumentError` unless these parameters can be stacked."""
    group = {name: number for number, one in enumerate(state.groups) for name in one.parameters}
    names = array_names(state.rules[layers[0]])

    def kind(name: str) -> dict[str, Any]:
        one = state.parameters[name]
        arrays = one.arrays()
        dtypes = {f"dtype of {field}": arrays[field].dtype.name if field in arrays else None for field in names}
        return {"group": group[name]} | dtypes | {"shape": one.shape, "compensation": one.compensated, "step": one.step}

    first = layers[0]
    for name in layers:
        for (what, value), expected in zip(kind(name).items(), kind(first).values(), strict=True):
            if value != expected:
                raise InvalidArgumentError(
                    f"the layers {listed(layers, 2)} cannot be stacked: {what} of {name!r} is {value}, of {first!r} "
                    f"{expected}; keep the layers apart, each under a name of its own."
                )


def _changed(parameter: ParameterState, change: Callable[[np.ndarray], np.ndarray]) -> ParameterState:
    """Apply a change of shape to each array of a parameter."""
    shape = change(np.broadcast_to(np.int8(0), parameter.shape)).shape
    return parameter.with_arrays(shape, {field: change(array) for field, array in parameter.arrays().items()})


def _stacked(layers: list[ParameterState]) -> ParameterState:
    columns = {field: [layer.arrays()[field] for layer in layers] for field in layers[0].arrays()}
    shape = (len(layers), *layers[0].shape)
    keys = tuple(key for layer in layers for key in layer.random_keys)
    whole = dataclasses.replace(layers[0], random_keys=keys if len(keys) == len(layers) else ())
    return whole.with_arrays(shape, {field: np.stack(column) for field, column in columns.items()})


def _unstacked(line: Line, parameter: ParameterState) -> list[ParameterState]:
    count = len(each(line.file))
    if parameter.shape[:1] != (count,):
        raise InvalidArgumentError(
            f"{line.own!r} has shape {parameter.shape}, and names gives {count} names for the layers along its leading axis; "
            "give one for each layer."
        )
    keys = layer_keys(parameter.random_keys, count)
    layers = [_changed(parameter, lambda array, n=n: array[n]) for n in range(count)]  # type: ignore[misc]
    return [dataclasses.replace(layer, random_keys=keys[n : n + 1]) for n, layer in enumerate(layers)]


def _last_parts(line: Line) -> tuple[str, str]:
    own, file = (each(side)[0].rpartition(".")[2] for side in (line.own, line.file))
    return own, file


def _usually_transposed(table: Table) -> dict[tuple[str, str], str]:
    """Last parts of the names of what is usually transposed, and why: by convention, or as others of the table are."""
    usual = dict.fromkeys(CONVENTIONS, "by the conventions of torch and flax")
    for line in table:
        if line.axes is None or list(line.axes) != sorted(line.axes):
            usual.setdefault(_last_parts(line), f"as names says of {each(line.own)[0]!r}")
    return usual


def _transposed(parameter: ParameterState, line: Line, usual: Mapping[tuple[str, str], str]) -> ParameterState:
    """Transpose one parameter, without layers. The shape of a square one does not show whether it was."""
    own, file = each(line.own)[0], each(line.file)[0]
    if not line.declared and is_square(parameter.shape) and (why := usual.get(_last_parts(line))):
        raise InvalidArgumentError(
            f"{own!r} becomes {file!r}, which would be transposed {why}, and the shape {parameter.shape} does not tell. Say it "
            'with names=: Transposed(NAME), or Transposed(NAME, ()) if it is not; in JSON "transposed": true, or false.'
        )
    if line.axes == ():
        return parameter
    if any(array.dtype.name in CODES for array in parameter.fields.values()) and len(parameter.shape) > 1:
        raise InvalidArgumentError(
            f"{own!r} becomes {file!r} transposed, and its state is in 8 bits, in blocks along its rows: transposed it would "
            "have other codes. Decode it first, into float32, with: penstock convert --decode, and import it into an optimizer "
            "with that state_dtype."
        )
    if line.axes is not None and len(line.axes) != len(parameter.shape):
        raise InvalidArgumentError(f"axes={line.axes} cannot be those of {own!r}, of shape {parameter.shape} (without layers).")
    return _changed(parameter, lambda array: array.transpose(line.axes))
