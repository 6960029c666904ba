"""The role of each array of an optimizer state: a field, a compensation, a count of updates, or not part of a file.

Only known states have a portable state. A chain, or a wrapper, has one if what it keeps besides a rule's fields is a count of
updates, which follows from the parameters' steps, or starts again without harm.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, cast

import jax
import optax

from ...core.codings import EightBit
from ...core.errors import InvalidArgumentError, RefusedError
from ...core.portable.state import scale_name
from ...core.rules import ADAM
from ..state import RULE_STATES, CompensatedState, PyTree, RuleState, Stochastic
from ..train_state import LayeredState, check_train_state
from ..walk.layer_stack import looks_stacked


class Kind(enum.Enum):
    """Kind of an array of an optimizer state."""

    FIELD = "field"  # of a rule
    COMPENSATION = "compensation"
    KEY = "key"  # of random bits
    COUNT = "count"  # of updates
    BETA = "beta"  # that a field is debiased by
    ZERO = "zero"  # between updates
    KEPT = "kept"  # not part of a portable state: it stays as it is where one is imported


@dataclasses.dataclass(frozen=True)
class Role:
    """Role of one array of an optimizer state."""

    kind: Kind
    names: tuple[str, ...]  # the parameter it belongs to; of a count or a beta, those that have it
    where: str  # its place in the optimizer state, for errors
    biased: bool = False  # a moment of Optax's Adam, or its count
    field: str = ""  # the name of a field, of its scales, or of a beta; "compensation", "random_keys"


# The known states of Optax by the names of their types (not all are exported), and the kinds of their fields; None: a state
# again. The counters of apply_if_finite only say how many updates in a row were dropped: they start again.
_FIELDS: dict[str, dict[str, Kind | None]] = {
    "ScaleByScheduleState": {"count": Kind.COUNT},
    "WrappedScheduleState": {"count": Kind.COUNT},
    "InjectHyperparamsState": {"count": Kind.COUNT, "hyperparams": Kind.KEPT, "inner_state": None},
    "InjectStatefulHyperparamsState": {
        "count": Kind.COUNT,
        "hyperparams": Kind.KEPT,
        "hyperparams_states": None,
        "inner_state": None,
    },
    "MaskedState": {"inner_state": None},
    "PartitionState": {"inner_states": None},
    "MultiTransformState": {"inner_states": None},
    "ApplyIfFiniteState": {
        "notfinite_count": Kind.KEPT,
        "last_finite": Kind.KEPT,
        "total_notfinite": Kind.KEPT,
        "inner_state": None,
    },
    "MultiStepsState": {
        "mini_step": Kind.ZERO,
        "gradient_step": Kind.COUNT,
        "inner_opt_state": None,
        "acc_grads": Kind.KEPT,
        "skip_state": Kind.KEPT,
    },
    "ZeroNansState": {"found_nan": Kind.KEPT},
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Parameters that a transform was given as one tree, and its state for them."""

    prefix: tuple[str, ...]  # of the parameters' names
    params: PyTree  # with a leading layer axis where layered
    state: PyTree  # of tx.init, for layers under jax.vmap
    layered: bool

    @property
    def kinds(self) -> PyTree:
        """Shapes and dtypes of the parameters as the transform gets them: of one layer."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:] if self.layered else leaf.shape, leaf.dtype), self.params
        )

    def name(self, path: Any, layer: int | None = None) -> str:
        """Return the name of a parameter: its path from the root of all parameters, joined by dots.

        Args:
            path: within this part.
            layer: with this number after the prefix.
        """
        inner = jax.tree_util.keystr(path, simple=True, separator=".")
        return ".".join([*self.prefix, *([] if layer is None else [str(layer)]), *([inner] if inner else [])]) or "params"

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by name.

        Raises:
            InvalidArgumentError: two have one name.
        """
        found: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            name = self.name(path)
            if name in found:
                raise InvalidArgumentError(
                    f"two parameters are called {name!r}, their paths joined by dots; rename one of them."
                )
            found[name] = leaf
        return found


def parts_of(state: Any) -> list[Part]:
    """Return the parts of a train state.

    Raises:
        InvalidArgumentError: it is not a train state, or its parameters do not fit its optimizer state.
    """
    check_train_state(state)
    params, opt_state = state.params, state.opt_state
    if not isinstance(opt_state, LayeredState):
        return [Part((), params, opt_state, False)]
    if not looks_stacked(params):
        raise InvalidArgumentError('the optimizer state is of {"outer": ..., "layers": ...}, but the parameters are not.')
    parts = [Part(("outer",), params["outer"], opt_state.outer, False)]
    if type(opt_state.layers) is dict:  # several stacks; no transform has a dict as its state
        stacks = opt_state.layers.items()
        return [*parts, *(Part(("layers", name), params["layers"][name], stack, True) for name, stack in stacks)]
    return [*parts, Part(("layers",), params["layers"], opt_state.layers, True)]


def has_fields(node: Any) -> bool:
    """Return whether a node of an optimizer state has the fields of a rule, penstock's or those of Optax's Adam."""
    return isinstance(node, (*RULE_STATES, optax.ScaleByAdamState))


def roles_of(part: Part, state: PyTree) -> PyTree:
    """Return a tree like the state of a part, or one of the same structure, with a `Role` for each array.

    Raises:
        RefusedError: a state that has no portable state.
    """
    return _roles(part, state, (), type(state).__name__)


def is_coded(node: Any) -> bool:
    """Whether a node of an optimizer state is a field in 8 bits."""
    return isinstance(node, EightBit)


def _is_empty(compensation: Any) -> bool:
    return compensation is None or isinstance(compensation, Stochastic)


def _names(part: Part, node: PyTree) -> tuple[str, ...]:
    """Return the names of the parameters that are updated by rules whose state is a node, or below it."""
    states = [found for found in jax.tree.leaves(node, is_leaf=has_fields) if has_fields(found)]
    # A rule may keep no field; its compensation is a tree like its parameters, of what has no leaf where there is none.
    trees = [found.mu if isinstance(found, optax.ScaleByAdamState) else found.compensation for found in states]
    leaves = (leaf for tree in trees for leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty))
    known = part.parameters()
    return tuple(name for path, _ in leaves if (name := part.name(path)) in known)


def _roles(part: Part, node: PyTree, scope: tuple[str, ...], where: str) -> PyTree:
    scope = _names(part, node) or scope

    biased = isinstance(node, optax.ScaleByAdamState)

    def each(kind: Kind, tree: PyTree, at: str, field: str) -> PyTree:
        """Return the roles of a tree like the parameters."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: Role(kind, (part.name(path),), f"{where}.{at}", biased, field), tree
        )

    def each_field(tree: PyTree, at: str, field: str) -> PyTree:
        """Return the roles of a field; of a coded one, of its codes and scales."""
        roles = each(Kind.FIELD, jax.tree.map(lambda leaf: 0, tree, is_leaf=is_coded), at, field)

        def of(role: Role, leaf: Any) -> Any:
            if not is_coded(leaf):
                return role
            return EightBit(role, dataclasses.replace(role, where=f"{role.where}.scale", field=scale_name(field)))

        return jax.tree.map(of, roles, tree, is_leaf=lambda node: isinstance(node, Role))

    def all_of(kind: Kind, tree: PyTree, at: str, field: str = "") -> PyTree:
        return jax.tree.map(lambda _: Role(kind, scope, f"{where}.{at}", biased, field), tree)

    if isinstance(node, optax.ScaleByAdamState):
        mu, nu = (field.name for field in ADAM.fields)
        moments = {"mu": each(Kind.FIELD, node.mu, "mu", mu), "nu": each(Kind.FIELD, node.nu, "nu", nu)}
        return node._replace(count=all_of(Kind.COUNT, node.count, "count"), **moments)
    if isinstance(node, RULE_STATES):
        node = node._replace(
            count=all_of(Kind.COUNT, node.count, "count"),
            fields={name: each_field(tree, f"fields[{name!r}]", name) for name, tree in node.fields.items()},
            compensation=each(Kind.COMPENSATION, node.compensation, "compensation", "compensation"),
            random_keys=each(Kind.KEY, node.random_keys, "random_keys", "random_keys"),
        )
        if isinstance(node, RuleState):
            return node
        return node._replace(betas={name: all_of(Kind.BETA, beta, "betas", name) for name, beta in node.betas.items()})
    if isinstance(node, CompensatedState):
        inner = _roles(part, node.inner_state, scope, f"{where}.inner_state")
        return CompensatedState(inner, each(Kind.COMPENSATION, node.compensation, "compensation", "compensation"))
    if type(node) in (tuple, list):
        return type(node)(_roles(part, child, scope, f"{where}[{index}]") for index, child in enumerate(node))
    if isinstance(node, dict):
        return {key: _roles(part, child, scope, f"{where}[{key!r}]") for key, child in node.items()}
    kind = type(node)
    fields = _FIELDS.get(kind.__name__) if kind.__module__.split(".")[0] == "optax" else None
    if fields is not None and fields.keys() == set(node._fields):
        return node._replace(
            **{
                field: _roles(part, getattr(node, field), scope, f"{where}.{field}")
                if role is None
                else all_of(role, getattr(node, field), field)
                for field, role in fields.items()
            }
        )
    if not jax.tree.leaves(node):
        return node
    raise RefusedError(
        f"a portable state has no place for the {kind.__name__} at {where} of the optimizer state: it holds a rule's fields, "
        "compensations and counts of updates. Keep such a state in a checkpoint of JAX, or take its transform out of the chain."
    )


def zipped(part: Part, roles: PyTree) -> Iterator[tuple[Role, Any]]:
    """Return every array of the state of a part with its role."""
    return cast("Iterator[tuple[Role, Any]]", zip(jax.tree.leaves(roles), jax.tree.leaves(part.state), strict=True))
