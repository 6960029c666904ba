"""The state of a training run: parameters and optimizer state, of unrolled models and of stacked layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.codings import EightBit
from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from .array_ops import NOT_TRAINED, check_floating
from .buffers import buffers, check_alive, is_array_like, strong
from .direct import as_transformation
from .loss_scaling import LossScale, as_loss_scale
from .random_bits import with_layer_keys
from .separability import check_takes
from .sharding import as_jit_returns, init_sharded_like, replicate
from .state import PyTree, Stochastic
from .walk.layer_stack import (
    LayerStack,
    check_layer_axis,
    check_outer_and_layers,
    check_parameters,
    looks_stacked,
    number_of_layers,
)


class TrainState(NamedTuple):
    """Parameters and optimizer state, which a training step takes and returns."""

    params: PyTree  # the parameters
    opt_state: PyTree  # of the Optax transform; a `LayeredState` for stacked layers
    loss_scale: LossScale | None = None  # None: the loss is not scaled


class LayeredState(NamedTuple):
    """The optimizer state of {"outer": ..., "layers": ...}, as `make_release_step` needs it."""

    outer: PyTree  # tx.init(outer)
    layers: PyTree  # tx.init of each layer by itself: every leaf, counts too, has a leading layer axis; or {name: that}


def check_train_state(state: Any) -> None:
    """Raise `InvalidArgumentError` unless `state` is a `TrainState`."""
    if not isinstance(state, TrainState):
        kind = "an array" if isinstance(state, jax.Array) else f"a {type(state).__name__}"
        raise InvalidArgumentError(
            f"state is {kind}, not a TrainState; make it with init_train_state(tx, params), or with "
            "TrainState(params, opt_state) of the two, and give each step the state that the last one returned."
        )


def init_train_state(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    stack: LayerStack | None = None,
    layered: bool | None = None,
    loss_scale: LossScale | float | None = None,
) -> TrainState:
    """Return the state before the first step. All its arrays are copies: params stay usable when the state is donated.

    With a layer axis each layer is updated by itself: what a transform computes of a tensor (StableAdamW's mean square, a
    norm) is computed of each layer's. Where params are sharded (`NamedSharding`), the arrays of the optimizer state are sharded
    as the parameters that they belong to.

    Args:
        tx: any Optax transform.
        params: floating-point arrays; copied. Give what the model reads and does not train (integers, keys, quantized weights)
            as part of the batch, or to the loss function by closure.
        stack: the model of `make_release_step`. params are checked against it; it has to be given where it has several stacks.
        layered: whether the optimizer state has a layer axis, as `make_release_step` and `release_layers` need it, and
            `make_train_step` does not. None: it has one if `stack` is given or params are a dict with exactly the keys "outer"
            and "layers".
        loss_scale: the factor by which the loss is multiplied before it is differentiated, for float16: a `dynamic_loss_scale`,
            or a number in [1, inf) that stays. It is copied into the state. None: the loss is not scaled.

    Raises:
        InvalidArgumentError: params that do not fit stack or layered, or have no arrays, or were donated; tx that is not a
            transform.
        UnsupportedTensorError: a parameter that is not a floating-point array.
        RefusedError: a transform of stacked layers that has a mask, or labels, for the tree of all parameters.

    Example:
        state = init_train_state(tx, {"outer": outer, "layers": layers}, loss_scale=dynamic_loss_scale())
    """
    as_transformation(tx)  # raises
    _check_parameters(params)
    scale = as_loss_scale(loss_scale)
    layered = _check_layered(stack, layered, params)
    copied = jax.tree.map(lambda leaf: as_jit_returns(strong(jnp.copy(leaf))), params)
    init = as_transformation(tx).init

    def init_part(part: PyTree, layers: range | None = None) -> PyTree:
        """Return the state of parameters, or of stacked ones, whose layers have these numbers."""
        axes = 0 if layers is None else 1
        check_takes(tx, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), part))

        def init_layers(part: PyTree) -> PyTree:
            return with_layer_keys(jax.vmap(init)(part), layers) if layers else init(part)

        return init_sharded_like(init_layers, part, copied)

    if layered:
        several = stack is not None and isinstance(stack.layer, Mapping)
        of_layers, first = {}, 0
        for name, part in copied["layers"].items() if several else [("layers", copied["layers"])]:
            count = number_of_layers(part)
            of_layers[name] = init_part(part, range(first, first + count))
            first += count
        opt_state: PyTree = LayeredState(init_part(copied["outer"]), of_layers if several else of_layers["layers"])
    else:
        opt_state = init_sharded_like(init, copied, copied)
    used: set[Any] = set()

    def unshared(leaf: Any) -> Any:
        # Some transforms start from the parameters themselves (averages of them); a buffer can be donated only once.
        found = buffers(leaf)
        shared = not used.isdisjoint(found)
        used.update(found)
        # A PRNG key is often the transform's own, which tx.init returns each time.
        shared |= jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return jnp.copy(leaf) if shared else strong(leaf)

    return jax.tree.map(unshared, TrainState(copied, opt_state, replicate(jax.tree.map(jnp.copy, scale), copied)))


def _check_layered(stack: Any, layered: Any, params: PyTree) -> bool:
    """Return whether the optimizer state has a layer axis, and raise `InvalidArgumentError` if params do not fit."""
    if stack is not None and not isinstance(stack, LayerStack):
        raise InvalidArgumentError(f"stack={stack!r} is not a LayerStack; give that of make_release_step, or leave it out.")
    if layered not in (None, True, False):
        raise InvalidArgumentError(f"layered={layered!r} is not possible; it must be True, False, or None.")
    if stack is not None:
        if layered is False:
            raise InvalidArgumentError("layered=False does not go with stack=, which has layers; leave one of them out.")
        check_parameters(stack, params)
        return True
    if layered is None:
        layered = looks_stacked(params)
    if layered:
        check_outer_and_layers(params)
        check_layer_axis(params["layers"], remedy=" For make_train_step give layered=False.")
    return bool(layered)


def _check_parameters(params: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise InvalidArgumentError("params have no arrays; give a tree with at least one.")
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if not is_array_like(leaf):
            raise UnsupportedTensorError(f"{name} is {type(leaf).__name__}; it must be a floating-point array. {NOT_TRAINED}.")
        check_alive(leaf, name)
    check_floating(params)


def check_made_by(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raise `InvalidArgumentError` unless an optimizer state has the structure that tx.init gives it for params.

    Args:
        params: arrays or jax.ShapeDtypeStructs.
    """
    found: Any = jax.tree.structure(opt_state)
    made = jax.eval_shape(as_transformation(tx).init, params)
    expected: Any = jax.tree.structure(made)
    if found != expected and found != _structure_after_an_update(tx, made, params):
        raise InvalidArgumentError(
            _in_another_coding(opt_state, made)
            or f"the optimizer state is not one of this transform: it is {found}, and tx.init makes {expected}. Make "
            "the state with init_train_state and the transform of the step."
        )


def _in_another_coding(state: PyTree, made: PyTree) -> str | None:
    """Return the error that names the first leaf of a state which has another coding than tx.init makes, if one has."""

    def is_leaf(node: Any) -> bool:
        return node is None or isinstance(node, (EightBit, Stochastic))

    def described(leaf: Any) -> str:
        return "nothing" if leaf is None else type(leaf).__name__ if is_leaf(leaf) else f"{leaf.dtype}"

    expected = dict(jax.tree_util.tree_leaves_with_path(made, is_leaf=is_leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf):
        found: Any = jax.tree.structure(leaf)
        if path in expected and found != jax.tree.structure(expected[path]):
            return (
                f"opt_state{jax.tree_util.keystr(path)} is {described(leaf)}, and tx.init makes {described(expected[path])}; "
                "give the transform the precision, or the dtypes and the compensation, that the state was made with, or carry "
                "the state over with export_state and import_state."
            )
    return None


def _structure_after_an_update(tx: optax.GradientTransformation, made: PyTree, params: PyTree) -> Any:
    """Return the structure of the state that an update returns, or None: optax.monitor begins without its measures."""
    try:
        return jax.tree.structure(jax.eval_shape(as_transformation(tx).update, params, made, params)[1])
    except (AttributeError, TypeError, ValueError):
        return None


def check_unstacked(tx: optax.GradientTransformation, state: TrainState) -> None:
    """Raise for parameters that cannot be trained, the state of stacked layers or of another transform, or a loss scale.

    Raises:
        InvalidArgumentError, UnsupportedTensorError.
    """
    check_train_state(state)
    if isinstance(state.opt_state, LayeredState):
        raise InvalidArgumentError(
            "this optimizer state has a layer axis, for make_release_step; make the state for make_train_step with "
            "init_train_state(tx, params, layered=False)."
        )
    if state.loss_scale is not None:
        raise InvalidArgumentError("make_train_step does not scale the loss; leave loss_scale out of init_train_state.")
    check_floating(state.params)
    check_made_by(tx, state.params, state.opt_state)
