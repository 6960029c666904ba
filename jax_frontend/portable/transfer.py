"""`export_state` and `import_state`."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.errors import InvalidArgumentError, in_wrong_order
from ...core.portable import file as portable_file
from ...core.portable.bias import Decays, decays_in, for_decays, with_bias, without_bias
from ...core.portable.match import check_own, matched
from ...core.portable.names import Names
from ...core.portable.rename import rename, rename_back
from ...core.portable.state import ParameterState, PortableState, scale_name
from ..arguments import dtype_argument
from ..random_bits import KEY
from ..state import PyTree
from ..train_state import LayeredState, TrainState
from .arrays import placed, to_host
from .opened import Opened, beta_in
from .processes import together
from .roles import Kind, Part, Role, zipped


def export_state(
    path: str | os.PathLike[str],
    tx: optax.GradientTransformation,
    state: TrainState,
    *,
    parameters: bool = False,
    names: Names = None,
    rule: str | None = None,
    betas: tuple[float, float] | None = None,
) -> None:
    r"""Write the state of an optimizer to a file that both frameworks read; an earlier file is replaced at the end.

    The file holds the debiased moments, the compensation, the random key and the number of updates of every parameter, bit for
    bit; of moments in 8 bits the codes and scales. The moments
    of optax.adam and optax.adamw are biased. They are divided in float64,

        mu / (1-b1^t)        nu / (1-b2^t)

    and rounded to the dtypes that they have, so they are not kept bit for bit.

    Where tx is a chain, or wrapped: of `optax.masked`, `partition`, `inject_hyperparams`, `apply_if_finite`, `MultiSteps`
    (between two updates), `compensated`, schedules and transforms without a state, the file holds all that a run needs to
    go on. A transform with another state is refused. The file has only parameters that a rule updates, no loss scale, and
    no values that `inject_hyperparams` keeps, but b1 and b2 of penstock's transforms.

    Args:
        path: of the file to write.
        tx: the transform whose state it is: penstock's, `optax.adam` or `optax.adamw`.
        state: `TrainState(params, opt_state)`. Parameters are called by their paths, joined with dots: "blocks.0.w". Of a state
            with a layer axis (`make_release_step`, `release_layers`) every layer is written by itself: "layers.0.w",
            "layers.1.w" and so on of {"layers": {"w": ...}}. Arrays on devices of several processes are gathered one by one:
            every process must call this, and the first writes.
        parameters: write the parameters, too.
        names: from the names here to those in the file: a mapping, or a function; see `core.portable.names`. A stack of layers
            is "layers.w" here, and has a list of names in the file, such as ["blocks.0.w", "blocks.1.w"].
        rule, betas: "adam" or "adamw", and (b1, b2), of optax.adam or optax.adamw, whose states do not tell them; None for
            penstock's transforms, which do. The betas are compared with what the transform does.

    Raises:
        RefusedError: a transform keeps something that the file has no place for; the file cannot be written.
        InvalidArgumentError: state is not a TrainState of tx, or was donated; rule or betas are wrong or missing; a name that
            does not fit.
    """
    opened = _opened(path, tx, state, rule, betas, parameters)
    entries = {}
    for name, slot in opened.slots.items():
        own = opened.rules[name]
        known = [array for field in own.fields for array in (field.name, scale_name(field.name))]
        fields, step = {array: to_host(slot.fields[array]) for array in known if array in slot.fields}, slot.step
        if opened.betas and slot.biased:
            fields = without_bias(fields, opened.betas, step, [array.dtype.name for array in fields.values()])
        kept, keys = slot.compensation, slot.random_keys
        expected = slot.expected(own)
        entries[name] = ParameterState(
            dtype=expected.dtype,
            shape=expected.shape,
            compensated=expected.compensated,
            step=step,
            fields=fields,
            compensation=None if kept is None else to_host(kept),
            random_keys=keys,
            parameter=to_host(slot.parameter) if parameters else None,
        )

    def save() -> None:
        if jax.process_index() == 0:
            whole = PortableState(opened.groups(), entries)
            portable_file.save(path, rename(whole, opened.table(names)))

    together(save)


def import_state(
    path: str | os.PathLike[str],
    tx: optax.GradientTransformation,
    state: TrainState,
    *,
    parameters: bool = False,
    names: Names = None,
    rule: str | None = None,
    betas: tuple[float, float] | None = None,
) -> TrainState:
    r"""Return a train state with what `export_state`, of either frontend, has written. All of the file is checked first.

    Training goes on bit for bit where the file came from this package in JAX. Moments of a lower dtype than tx keeps are
    upcast, and codes of 8 bits decoded, which is exact; a compensation that the file does not have starts with zeros. For
    optax.adam and optax.adamw the moments are multiplied by 1-b^t in float64 and rounded to the dtypes that they have there.
    Counts of updates, those of schedules as well, become the file's. Where tx has other betas than the file, training goes on
    as if they had changed at this moment.

    Args:
        path: of the file. Every process reads it.
        tx: the transform, with the file's rules.
        state: of tx, as `init_train_state` makes it. It gives the arrays' dtypes and shardings; it stays as it is and
            shares no memory with what is returned.
        parameters: take the parameters that a rule updates from the file, too. Otherwise they all are those of `state`,
            which must be *of the same moment*: a compensation holds the lost digits of those values.
        names: from the names here to those in the file, as for `export_state`.
        rule, betas: as for `export_state`.

    Raises:
        RefusedError: tx keeps something that the file has no place for.
        InvalidArgumentError: the file is damaged, or is not of these rules, model, dtypes or compensation; state is not a
            TrainState of tx, or was donated; parameters of one count that had different numbers of updates.
    """
    opened = _opened(path, tx, state, rule, betas, parameters)
    # Every process reads the file; what follows may gather arrays, so that none may fail alone.
    entries, decays_of_file = together(lambda: _matched(path, opened, names, parameters), same=_described)
    arrays: dict[tuple[str, str], np.ndarray | None] = {}  # by parameter and `Role.field`
    for name, slot in opened.slots.items():
        entry = entries[name]
        check_own(name, entry, functools.partial(_holds, slot.parameter), parameters=parameters, layered=slot.layered)
        fields = entry.fields
        if opened.betas and slot.biased:
            dtypes = list(slot.dtypes(opened.rules[name]).values())
            fields = with_bias(opened.rules[name], name, fields, opened.betas, entry.step, dtypes)
        arrays |= {(name, field): array for field, array in fields.items()}
        arrays[name, "compensation"] = entry.compensation
        if entry.random_keys:
            arrays[name, "random_keys"] = np.asarray(entry.random_keys if slot.layered else entry.random_keys[0], KEY)
    steps = {name: entry.step for name, entry in entries.items()}

    def value(role: Role, leaf: Any) -> np.ndarray | None:
        """Return the new value of an array, or None if it stays."""
        if role.kind is Kind.COUNT:
            return _count(role, leaf, steps)
        if role.kind is Kind.BETA and (found := decays_of_file[role.names[0]]) is not None:
            return np.full(leaf.shape, beta_in(opened.rules[role.names[0]], found, role.field), leaf.dtype)
        return arrays.get((role.names[0], role.field)) if role.names else None

    # All values are known before any is put on a device.
    values = [[value(role, leaf) for role, leaf in zipped(part, roles)] for part, roles in opened.parts]
    states = [
        jax.tree.unflatten(
            jax.tree.structure(part.state),
            [_new(array, leaf) for array, leaf in zip(of_part, jax.tree.leaves(part.state), strict=True)],
        )
        for (part, _), of_part in zip(opened.parts, values, strict=True)
    ]
    trees = [_with_parameters(part, entries if parameters else {}) for part, _ in opened.parts]
    return _joined(state, [part for part, _ in opened.parts], trees, states)


def _opened(path: Any, tx: optax.GradientTransformation, state: TrainState, rule: Any, betas: Any, parameters: bool) -> Opened:
    others = (TrainState, optax.GradientTransformation)
    if isinstance(path, others) or isinstance(tx, TrainState) or isinstance(state, optax.GradientTransformation):
        raise in_wrong_order(path=path, tx=tx, state=state)

    def described(opened: Opened) -> Any:
        return [(name, opened.rules[name].name, slot.parameter.shape) for name, slot in opened.slots.items()], parameters

    return together(lambda: Opened.of(tx, state, rule, betas), same=described)


def _matched(
    path: str | os.PathLike[str], opened: Opened, names: Names, parameters: bool
) -> tuple[dict[str, ParameterState], dict[str, Decays | None]]:
    """Return the parameters of a file as the transform keeps them, and the betas in the file, by their names here."""
    given = rename_back(portable_file.load(path), opened.table(names))
    expected = {name: slot.expected(opened.rules[name]) for name, slot in opened.slots.items()}
    arguments = {field.name: dtype_argument(field) for rule in opened.rules.values() for field in rule.fields}
    entries = matched(given, expected, parameters=parameters, arguments=arguments)
    decays = {name: decays_in(given, name) for name in entries}
    own = opened.decays_after_import(decays)
    return {name: for_decays(entry, decays[name], own[name]) for name, entry in entries.items()}, decays


def _described(found: tuple[dict[str, ParameterState], Any]) -> Any:
    return [(name, entry.step, sorted(entry.arrays())) for name, entry in found[0].items()]


def _holds(parameter: Any, array: np.ndarray) -> bool:
    return np.array_equal(to_host(parameter), array)


def _count(role: Role, leaf: Any, steps: dict[str, int]) -> np.ndarray | None:
    found = sorted({steps[name] for name in role.names or steps})
    if len(found) > 1 and not role.names:  # a count of no parameter is not used
        return None
    if len(found) > 1:
        other = next(name for name in role.names if steps[name] != steps[role.names[0]])
        raise InvalidArgumentError(
            f"{role.names[0]!r} has had {steps[role.names[0]]} updates and {other!r} {steps[other]}, but {role.where} counts "
            "those of both; give each kind a transform of its own with optax.partition."
        )
    if found[0] > jnp.iinfo(leaf.dtype).max:
        raise InvalidArgumentError(f"the file counts {found[0]} updates, more than {role.where}, {leaf.dtype}, can hold.")
    return np.full(leaf.shape, found[0], leaf.dtype)


def _new(array: np.ndarray | None, leaf: Any) -> Any:
    return jnp.copy(leaf) if array is None else placed(array, leaf)


def _with_parameters(part: Part, entries: dict[str, ParameterState]) -> PyTree:
    def new(path: Any, leaf: Any) -> Any:
        entry = entries.get(part.name(path))
        return _new(None if entry is None else entry.parameter, leaf)

    return jax.tree_util.tree_map_with_path(new, part.params)


def _joined(state: TrainState, parts: list[Part], trees: list[PyTree], states: list[PyTree]) -> TrainState:
    """Return the train state of which `parts_of` made the parts."""
    scale = jax.tree.map(jnp.copy, state.loss_scale)
    if len(parts) == 1:
        return TrainState(trees[0], states[0], scale)

    def layers(found: list[PyTree]) -> PyTree:
        stacks = {part.prefix: tree for part, tree in zip(parts[1:], found[1:], strict=True)}
        return stacks[("layers",)] if ("layers",) in stacks else {prefix[1]: tree for prefix, tree in stacks.items()}

    params = {"outer": trees[0], "layers": layers(trees)}
    return TrainState(params, LayeredState(states[0], layers(states)), scale)
