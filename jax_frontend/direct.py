r"""Applying an update directly: from gradient and parameter to the new parameter, without adding an increment.

An Optax transform returns an increment u in the parameter's dtype, and the caller adds it: p' = cast(p + u). In low
precision that rounds once more than the specification does, and not every p' can be reached. Here the exact p' is taken
from the records of penstock's transforms (`records`), where the increment that a record is about is what comes out of the whole
transform for the very parameter of the record: then nothing has changed it since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from ..core.errors import InvalidArgumentError, PenstockError, RefusedError
from .records import ARGUMENT, Recorder, Source
from .state import RULE_STATES, CompensatedState, PyTree, compensated_leaves


def _states(*names: str) -> tuple[type, ...]:
    return tuple(getattr(optax, name) for name in names if hasattr(optax, name))


_DECIDING_STATES = _states("ApplyIfFiniteState", "MultiStepsState", "ConditionallyTransformState", "ConditionallyMaskState")
"""States of the wrappers that return either their inner transform's increment or none, through a conditional."""

_PASSING_STATES = _states("InjectHyperparamsState", "InjectStatefulHyperparamsState", "MaskedState", "PartitionState")
"""States of the wrappers that return their inner transforms' increments as they are."""

_INNER_STATES = ("inner_state", "inner_opt_state", "inner_states")
"""Fields of these states with the state of what they wrap; the last one is a dict, by group of parameters."""


_NOT_LAST = (
    "a compensated transform must be the last one to touch its updates, but here a later transform in a chain or a wrapper "
    "around it (such as optax.lookahead or optax.contrib.schedule_free) changes them, or hides whether it does. Put it "
    "last, a wrapper that decides whether to update (optax.apply_if_finite, optax.MultiSteps) directly around it or around "
    "the chain that ends with it; or turn its compensation off with compensation='none'."
)


def _contains(state: PyTree, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)


def _compensates_last(state: PyTree) -> bool:
    """Return whether nothing follows a compensated transform, judged by the states of chains (tuples) and wrappers."""
    if isinstance(state, (*RULE_STATES, CompensatedState)) or not compensated_leaves(state):
        return True
    if type(state) is tuple:
        return not compensated_leaves(state[:-1]) and _compensates_last(state[-1])
    if not isinstance(state, (*_DECIDING_STATES, *_PASSING_STATES)):
        return False
    inner = next(getattr(state, name) for name in _INNER_STATES if hasattr(state, name))
    return all(_compensates_last(each) for each in (inner.values() if isinstance(inner, dict) else (inner,)))


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return tx, or the transform of an object such as optax.MultiSteps, as one that takes extra arguments.

    Raises:
        InvalidArgumentError: it is not a transform.
    """
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise InvalidArgumentError(
            f"tx is a {type(tx).__name__}, not an Optax transform; give one that was called, such as stable_adamw(1e-3)."
        )
    if not isinstance(tx, optax.GradientTransformation) and hasattr(tx, "gradient_transformation"):
        tx = tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def sources_of(tx: Any, params: PyTree) -> dict[Any, Source]:
    """Return the transform of penstock that updates each parameter, by path; nothing is computed.

    Args:
        tx: any Optax transform.
        params: arrays or jax.ShapeDtypeStructs.
    """
    # optax.MultiSteps passes extra arguments on, but not as the transform that it calls itself.
    transform = as_transformation(tx) if isinstance(tx, optax.GradientTransformation) else tx
    recorder = Recorder()

    def update(params: PyTree) -> PyTree:
        return transform.update(params, transform.init(params), params, **{ARGUMENT: recorder})

    jax.eval_shape(update, params)
    return {record.path: record.source for record in recorder.records if record.source is not None}


_NOT_TAKEN = re.compile(f"{ARGUMENT}|unexpected keyword argument|vmap was requested to map")
"""In the errors of what does not take an extra argument, or passes all of them to jax.jit or jax.vmap."""


def _updated(tx: Any, grads: PyTree, state: PyTree, params: PyTree, extras: Sequence[dict[str, Any]]) -> tuple[PyTree, PyTree]:
    """Return tx.update with the first of several sets of extra arguments that it takes."""
    *others, last = extras
    for extra_args in others:
        try:
            return as_transformation(tx).update(grads, state, params, **extra_args)
        except (TypeError, ValueError) as error:
            if isinstance(error, PenstockError) or not _NOT_TAKEN.search(str(error)):
                raise
    return as_transformation(tx).update(grads, state, params, **last)


def apply_directly(
    tx: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    offered: dict[str, Any] | None = None,
    in_turn: bool = True,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Update the parameters: tx.update and optax.apply_updates in one, with penstock's transforms exact.

    Of penstock's transforms the new parameters are those of the specification, rounded once and with the exact
    compensation. Increments of other transforms are added. Under a wrapper that decides whether there is an update
    (optax.apply_if_finite, optax.MultiSteps) the increment is added, too, and a compensation is exact while
    p/2 <= p' <= 2p; whether the transform is the last one is then judged by the state, in which a stateless wrapper of one's
    own cannot be seen.

    Args:
        tx: any Optax transform.
        grads: like params; any floating-point dtypes.
        state: of tx.
        params: the parameters.
        offered: extra arguments that are passed to tx.update if it takes them.
        in_turn: all gradients exist already, so that a parameter's update may wait for that of another one.
        extra_args: passed to tx.update.

    Returns:
        The new parameters and the new state.

    Raises:
        RefusedError: a later transform or a wrapper changes or hides the increment of a compensated one.
    """
    decides = _contains(state, _DECIDING_STATES)
    if decides and not _compensates_last(state):
        raise RefusedError(_NOT_LAST)
    recorder, told = Recorder(in_turn), {**(offered or {}), **extra_args}
    extras = [told, extra_args] if decides else [{**told, ARGUMENT: recorder}, told, extra_args]
    updates, new_state = _updated(tx, grads, state, params, extras)
    treedef: Any
    old, treedef = jax.tree.flatten(params, is_leaf=lambda x: x is None)
    # By parameter and increment: no wrapper can have given either to another one. The records keep both, and so their ids.
    exact = {(id(record.parameter), id(record.increment)): record for record in recorder.records if record.new is not None}
    new, taken = [], 0
    for parameter, increment in zip(old, treedef.flatten_up_to(updates), strict=True):
        record = exact.get((id(parameter), id(increment)))
        if record is not None:
            taken += record.compensated
            new.append(record.new)
        else:
            new.append(parameter if increment is None else optax.apply_updates(parameter, increment))
    if not decides and taken != compensated_leaves(state):
        raise RefusedError(_NOT_LAST)
    return treedef.unflatten(new), new_state
