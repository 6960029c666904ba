r"""Applying an update directly: from gradient and parameter to the new parameter, without the detour of an increment.

An Optax transform returns an increment u in the parameter's dtype, and the caller adds it: p' = cast(p + u). In low
precision that is one rounding more than the specification has, and not every p' can be reached. A caller that also
applies the update does better: it hands a `Destination` to the transform as an extra argument, which every Optax
combinator passes on; the transform puts the exact new parameter there, under the increment that it returns as always.
Where that very increment comes out of the whole chain, nothing has changed it since, and the exact parameter is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from ..core.errors import InvalidArgumentError, RefusedError
from .state import AdamState, CompensatedState, PyTree, compensated_leaves

ARGUMENT = "penstock_destination"
"""Name of the extra argument that carries the `Destination` through chains."""


def _states(*names: str) -> tuple[type, ...]:
    return tuple(getattr(optax, name) for name in names if hasattr(optax, name))


_DECIDING_STATES = _states("ApplyIfFiniteState", "MultiStepsState", "ConditionallyTransformState", "ConditionallyMaskState")
"""States of the wrappers that hand out either their inner transform's increment or none, through a conditional."""

_PASSING_STATES = _states("InjectHyperparamsState", "InjectStatefulHyperparamsState", "MaskedState", "PartitionState")
"""States of the wrappers that hand out their inner transforms' increments as they are."""

_INNER_STATES = ("inner_state", "inner_opt_state", "inner_states")
"""What these states call the state of what they wrap; the last one is a dict, one for each group of parameters."""


_NOT_LAST = (
    "a compensated transform must be the last one to touch its updates, but here a later transform in a chain or a wrapper "
    "around it (such as optax.lookahead or optax.contrib.schedule_free) changes them, or hides whether it does. Put it "
    "last, a wrapper that decides whether to update (optax.apply_if_finite, optax.MultiSteps) directly around it or around "
    "the chain that ends with it; or turn its compensation off with compensation='none'."
)


class _Deposit(NamedTuple):
    update: jax.Array  # held, so that its id stays its own
    parameter: jax.Array
    compensated: bool


class Destination:
    """Where penstock's transforms put the exact new parameters, one beside each increment they return."""

    def __init__(self) -> None:
        self._deposits: dict[int, _Deposit] = {}
        self.without_gradient = 0
        """Compensated parameters that have no gradient, so that nothing is put here for them."""

    def put(self, update: jax.Array, parameter: jax.Array, *, compensated: bool) -> None:
        """`parameter` is exactly what `update` leads to; `compensated`: the state counts on it being taken."""
        self._deposits[id(update)] = _Deposit(update, parameter, compensated)

    def take(self, update: Any) -> _Deposit | None:
        """What was put beside this very increment, or None if it is another one."""
        return self._deposits.get(id(update))


def destination_of(extra_args: dict[str, Any]) -> Destination | None:
    """The destination among the extra arguments of an update; it is removed from them."""
    found = extra_args.pop(ARGUMENT, None)
    return found if isinstance(found, Destination) else None  # optax.partition may have masked it away


def _contains(state: PyTree, kinds: tuple[type, ...]) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)


def _compensates_last(state: PyTree) -> bool:
    """Whether nothing follows a compensated transform, as far as the states of chains (tuples) and wrappers tell."""
    if isinstance(state, AdamState | CompensatedState) or not compensated_leaves(state):
        return True
    if type(state) is tuple:
        return not compensated_leaves(state[:-1]) and _compensates_last(state[-1])
    if not isinstance(state, (*_DECIDING_STATES, *_PASSING_STATES)):
        return False
    inner = next(getattr(state, name) for name in _INNER_STATES if hasattr(state, name))
    return all(_compensates_last(each) for each in (inner.values() if isinstance(inner, dict) else (inner,)))


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """tx, or what an object such as optax.MultiSteps stands for, taking extra arguments.

    Raises:
        InvalidArgumentError: it is no transform.
    """
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise InvalidArgumentError(
            f"tx={tx!r} is not an Optax transform; give one that was called, such as stable_adamw(1e-3)."
        )
    if not isinstance(tx, optax.GradientTransformation) and hasattr(tx, "gradient_transformation"):
        tx = tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def apply_directly(
    tx: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """One update, applied: what tx.update and optax.apply_updates do together, with penstock's transforms exact.

    Of penstock's transforms the new parameters are taken as the specification has them, rounded once and with the exact
    compensation. Increments of other transforms are added. Under a wrapper that decides whether there is an update
    (optax.apply_if_finite, optax.MultiSteps) the increment is added, too, and a compensation is exact while
    p/2 <= p' <= 2p; its place is then read off the state, where a stateless wrapper of one's own cannot be seen.

    Args:
        tx: any Optax transform.
        grads: like params; any floating-point dtypes.
        state: of tx.
        params: the parameters.
        extra_args: passed to tx.update.

    Returns:
        The new parameters and the new state.

    Raises:
        RefusedError: a later transform or a wrapper changes or hides the increment of a compensated one.
    """
    destination = None if _contains(state, _DECIDING_STATES) else Destination()
    if destination is None and not _compensates_last(state):
        raise RefusedError(_NOT_LAST)
    passed = extra_args if destination is None else {**extra_args, ARGUMENT: destination}
    updates, new_state = as_transformation(tx).update(grads, state, params, **passed)
    treedef: Any
    old, treedef = jax.tree.flatten(params, is_leaf=lambda x: x is None)
    increments = treedef.flatten_up_to(updates)
    new = [p if u is None else optax.apply_updates(p, u) for p, u in zip(old, increments, strict=True)]
    if destination is not None:
        deposits = [destination.take(update) for update in increments]
        taken = sum(d.compensated for d in deposits if d is not None)
        if taken + destination.without_gradient != compensated_leaves(state):
            raise RefusedError(_NOT_LAST)
        new = [added if d is None else d.parameter for added, d in zip(new, deposits, strict=True)]
    return treedef.unflatten(new), new_state
