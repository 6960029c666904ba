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

from ..core.errors import Refused
from .state import PyTree, compensated_leaves

ARGUMENT = "penstock_destination"
"""Name of the extra argument that carries the `Destination` through chains."""

_DECIDING_STATES = tuple(
    getattr(optax, name)
    for name in ("ApplyIfFiniteState", "MultiStepsState", "ConditionallyTransformState", "ConditionallyMaskState")
    if hasattr(optax, name)
)
"""States of the wrappers that hand out either their inner transform's increment or none, through a conditional."""


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


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """tx, or what an object such as optax.MultiSteps stands for, taking extra arguments."""
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
    p/2 <= p' <= 2p.

    Args:
        tx: any Optax transform.
        grads: like params; any floating-point dtypes.
        state: of tx.
        params: the parameters.
        extra_args: passed to tx.update.

    Returns:
        The new parameters and the new state.

    Raises:
        Refused: a later transform changes, or a wrapper hides, the increment of a compensated one.
    """
    destination = None if _contains(state, _DECIDING_STATES) else Destination()
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
            raise Refused(
                "a compensated transform must be the last one to touch its updates, but here a later transform changes "
                "them or a wrapper around it does not pass on extra arguments. Put it last in the chain, or turn its "
                "compensation off with compensation='none'."
            )
        new = [added if d is None else d.parameter for added, d in zip(new, deposits, strict=True)]
    return treedef.unflatten(new), new_state
