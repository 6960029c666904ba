"""A portable state under other names: its layers stacked or taken apart, its arrays transposed, as a table of names says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from .names import LAYER, Names, Table, Target, Transposed, inverted, layers_of, name_of, refuse_equal, table_of
from .state import ARRAYS, ParameterState, PortableGroup, PortableState, listed

CONVENTIONS = (("kernel", "weight"), ("weight", "kernel"))
"""Last parts of names of which the one side's lies transposed: flax has kernels [in, out], torch weights [out, in]."""


def rename(state: PortableState, names: Names) -> PortableState:
    """The state under the file's names, its layers stacked, taken apart and transposed as `names` says.

    With ``inverted(table_of(names, own))`` a state under the file's names becomes one under this side's. Nothing is copied
    but what is stacked.

    Args:
        state: under this side's names.
        names: as users give them.

    Raises:
        InvalidArgumentError: as `table_of`; layers that cannot be stacked, or a parameter that has no layers or not these
            axes; a square matrix of which it has to be declared how it lies.
    """
    table = table_of(names, state.parameters)
    if not table:
        return state
    pairs = _transposed_pairs(table)
    # Of each name the new ones; of names that are stacked the first has it, the others none.
    becomes: dict[str, list[tuple[str, ParameterState]]] = {}
    for key in (key for key in table if LAYER in key):
        layers = layers_of(key, state.parameters)
        _check_stackable(key, layers, state)
        parts = [_transposed(state.parameters[name], table[key], name, pairs) for name in layers.values()]
        becomes |= {name: [] for name in layers.values()}
        becomes[layers[0]] = [(name_of(table[key]), _stack(parts))]
    for name, parameter in state.parameters.items():
        if name in becomes:
            continue
        target = table.get(name, name)
        if LAYER in (new := name_of(target)):
            parts = [_transposed(part, target, name, pairs) for part in _unstack(name, parameter)]
            becomes[name] = [(new.replace(LAYER, str(n)), part) for n, part in enumerate(parts)]
        else:
            becomes[name] = [(new, _transposed(parameter, target, name, pairs))]
    refuse_equal(new for parts in becomes.values() for new, _ in parts)
    groups = tuple(
        PortableGroup(group.hyperparameters, tuple(new for name in group.parameters for new, _ in becomes[name]))
        for group in state.groups
    )
    return PortableState(state.rule, groups, {new: part for parts in becomes.values() for new, part in parts})


def rename_back(state: PortableState, table: Table) -> PortableState:
    """The state under this side's names, of one under a file's: what undoes `rename`.

    Args:
        state: under the file's names.
        table: of this side's names, as `table_of` makes it.

    Raises:
        InvalidArgumentError: as `rename`; the state lacks what the table leads to.
    """
    back = inverted(table)
    lacking = [name for name in back if not (layers_of(name, state.parameters) if LAYER in name else name in state.parameters)]
    if lacking:
        raise InvalidArgumentError(
            f"the state lacks {listed(lacking, 3)} (here {listed([name_of(back[name]) for name in lacking], 3)}); it has "
            f"{listed(list(state.parameters), 3)}; give names= to say how the parameters are called in the file."
        )
    return rename(state, back)


def is_square(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape, without layers, has the same shape with all axes reversed, and is no vector."""
    return len(shape) > 1 and shape == shape[::-1] and min(shape) > 0 and max(shape) > 1


def _check_stackable(key: str, layers: Mapping[int, str], state: PortableState) -> None:
    """Raise `InvalidArgumentError` unless these can be one parameter."""
    if list(layers) != list(range(len(layers))):
        missing = next(n for n in range(len(layers)) if n not in layers)
        raise InvalidArgumentError(f"{key!r} cannot be stacked: there is a layer {max(layers)}, but no layer {missing}.")
    first = layers[0]
    group = {name: number for number, one in enumerate(state.groups) for name in one.parameters}

    def kind(name: str) -> dict[str, Any]:
        one = state.parameters[name]
        dtypes = {f"dtype of {field}": array.dtype.name for field, array in one.arrays().items()}
        known = {
            "shape": one.shape,
            "dtype": one.dtype,
            "compensation": one.compensated,
            "step": one.step,
            "group": group[name],
        }
        return dict.fromkeys((f"dtype of {field}" for field in ARRAYS), None) | dtypes | known

    expected = kind(first)
    for name in layers.values():
        for what, value in kind(name).items():
            if value != expected[what]:
                raise InvalidArgumentError(
                    f"{key!r} cannot be stacked: {what} of {name!r} is {value}, of {first!r} {expected[what]}; "
                    "keep the layers apart, each under a name of its own."
                )


def _map(parameter: ParameterState, change: Callable[[np.ndarray], np.ndarray]) -> ParameterState:
    """The same change for each of its arrays."""
    arrays: dict[str, Any] = {field: change(array) for field, array in parameter.arrays().items()}
    return dataclasses.replace(parameter, shape=arrays["exp_avg"].shape, **arrays)


def _stack(parts: list[ParameterState]) -> ParameterState:
    arrays: dict[str, Any] = {field: np.stack([getattr(part, field) for part in parts]) for field in parts[0].arrays()}
    return dataclasses.replace(parts[0], shape=arrays["exp_avg"].shape, **arrays)


def _unstack(name: str, parameter: ParameterState) -> list[ParameterState]:
    if not parameter.shape or not parameter.shape[0]:
        raise InvalidArgumentError(
            f"{name!r} has shape {parameter.shape}: no layers along a leading axis, as its new name says."
        )
    return [_map(parameter, itemgetter(n)) for n in range(parameter.shape[0])]


def _last_parts(name: str, target: Target) -> tuple[str, str]:
    return name.rpartition(".")[2], name_of(target).rpartition(".")[2]


def _transposed_pairs(table: Table) -> dict[tuple[str, str], str]:
    """Last parts of the names of what usually lies transposed, and why: by convention, or as others of the table do."""
    said = dict.fromkeys(CONVENTIONS, "by the conventions of torch and flax")
    for name, target in table.items():
        if isinstance(target, Transposed) and (target.axes is None or list(target.axes) != sorted(target.axes)):
            said.setdefault(_last_parts(name, target), f"as names says of {name!r}")
    return said


def _transposed(parameter: ParameterState, target: Target, name: str, pairs: Mapping[tuple[str, str], str]) -> ParameterState:
    """One parameter, without layers, as it lies on the other side. The shape of a square one does not tell how it lies."""
    if not isinstance(target, Transposed):
        why = pairs.get(_last_parts(name, target))
        if why and is_square(parameter.shape):
            raise InvalidArgumentError(
                f"{name!r} becomes {name_of(target)!r}, which would lie transposed {why}, and the shape {parameter.shape} does "
                "not tell. Say it with names=: Transposed(NAME), or Transposed(NAME, ()) if it lies as it is; in JSON "
                '"transposed": true, or false.'
            )
        return parameter
    if target.axes == ():
        return parameter
    if target.axes is not None and len(target.axes) != len(parameter.shape):
        raise InvalidArgumentError(
            f"axes={target.axes} cannot be those of {name!r}, of shape {parameter.shape} (without layers)."
        )
    return _map(parameter, lambda array: array.transpose(target.axes))
