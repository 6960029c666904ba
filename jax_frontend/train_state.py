"""What a training step takes and gives back: parameters and optimizer state, of unrolled models and of stacked layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.errors import InvalidArgumentError, UnsupportedTensorError
from .array_ops import ELSEWHERE, check_floating
from .buffers import buffers, check_alive, is_array_like, strong
from .direct import as_transformation
from .loss_scaling import LossScale, as_loss_scale
from .separability import check_takes
from .sharding import made_beside, put_everywhere
from .state import PyTree
from .walk.layer_stack import NO_OUTER, LayerStack, check_layer_axis, check_parameters, looks_stacked


class TrainState(NamedTuple):
    """What a training step takes and gives back."""

    params: PyTree  # the parameters
    opt_state: PyTree  # of the Optax transform; a `LayeredState` for stacked layers
    loss_scale: LossScale | None = None  # None: the loss is not scaled


class LayeredState(NamedTuple):
    """The optimizer state of {"outer": ..., "layers": ...}, as `make_release_step` needs it."""

    outer: PyTree  # tx.init(outer)
    layers: PyTree  # tx.init of each layer by itself: every leaf, counts too, has a leading layer axis; or {name: that}


def check_train_state(state: Any) -> None:
    """Raise `InvalidArgumentError` for anything else than a `TrainState`."""
    if not isinstance(state, TrainState):
        raise InvalidArgumentError(
            f"state is a {type(state).__name__}, no TrainState; make it with init_train_state(tx, params), or "
            "TrainState(params, opt_state) of what is held apart, and give each step the state that the last one returned."
        )


def init_train_state(
    tx: optax.GradientTransformation,
    params: PyTree,
    stack: LayerStack | bool | None = None,
    *,
    loss_scale: LossScale | float | None = None,
) -> TrainState:
    """The state before the first step. Every array in it is its own: params stay usable when the state is donated.

    For stacked layers the optimizer state has a layer axis: each layer is updated by itself, and what a transform takes of
    a tensor (StableAdamW's mean square, a norm) is taken of each layer's. Where params are sharded (`NamedSharding`), so is
    what the state has beside each of them.

    Args:
        tx: any Optax transform.
        params: floating-point arrays; copied. What the model reads and does not train (integers, keys, quantized weights)
            goes into the batch, or into the loss function by closure.
        stack: of what kind params are. None: a dict with exactly the keys "outer" and "layers" is one stack of layers,
            as `make_release_step` takes it; everything else is for `make_train_step`. A `LayerStack` says it itself, and
            has to be given where it has several stacks. False: for `make_train_step`, whatever the keys are.
        loss_scale: what the loss is multiplied by before it is differentiated, for float16: a `dynamic_loss_scale`, or a
            number in [1, inf) that stays. It is copied into the state. None: the loss is not scaled.

    Raises:
        InvalidArgumentError: params that are not what stack says, or have no arrays, or were donated; tx is no transform.
        UnsupportedTensorError: a parameter that is no floating-point array.
        RefusedError: a transform of stacked layers that has a mask, or labels, for the tree of all parameters.
    """
    as_transformation(tx)  # raises
    _check_parameters(params)
    scale = as_loss_scale(loss_scale)
    if stack is not None and stack is not False and not isinstance(stack, LayerStack):
        raise InvalidArgumentError(f"stack={stack!r} is not possible; give the LayerStack, False, or leave it out.")
    if isinstance(stack, LayerStack):
        check_parameters(stack, params)
    single = stack is None and looks_stacked(params)
    if single:
        if params["outer"] is None:
            raise InvalidArgumentError(NO_OUTER)
        check_layer_axis(params["layers"], remedy=" For make_train_step give stack=False.")
    copied = jax.tree.map(lambda leaf: strong(jnp.copy(leaf)), params)
    init = as_transformation(tx).init

    def of_part(part: PyTree, make: Callable[[PyTree], PyTree] = init) -> PyTree:
        first = 0 if make is init else 1
        check_takes(tx, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype), part))
        return made_beside(make, part, copied)

    if single or isinstance(stack, LayerStack):
        layers, of_layers = copied["layers"], jax.vmap(init)
        named = isinstance(stack, LayerStack) and isinstance(stack.layer, Mapping)
        opt_state: PyTree = LayeredState(
            of_part(copied["outer"]),
            {name: of_part(layers[name], of_layers) for name in layers} if named else of_part(layers, of_layers),
        )
    else:
        opt_state = made_beside(init, copied, copied)
    taken: set[Any] = set()

    def own(leaf: Any) -> Any:
        # Some transforms start from the parameters themselves (averages of them); a buffer can be donated only once.
        held = buffers(leaf)
        shared = not taken.isdisjoint(held)
        taken.update(held)
        return jnp.copy(leaf) if shared else strong(leaf)

    return jax.tree.map(own, TrainState(copied, opt_state, put_everywhere(jax.tree.map(jnp.copy, scale), copied)))


def _check_parameters(params: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise InvalidArgumentError("params have no arrays; give a tree with at least one.")
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if not is_array_like(leaf):
            raise UnsupportedTensorError(f"{name} is {type(leaf).__name__}; it must be a floating-point array. {ELSEWHERE}.")
        check_alive(leaf, name)
    check_floating(params)


def check_made_by(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raise `InvalidArgumentError` unless an optimizer state has the structure that tx.init gives it for params.

    Args:
        params: arrays or jax.ShapeDtypeStructs.
    """
    structures: list[Any] = [jax.tree.structure(opt_state)]
    structures.append(jax.tree.structure(jax.eval_shape(as_transformation(tx).init, params)))
    if structures[0] != structures[1]:
        raise InvalidArgumentError(
            f"the optimizer state is not one of this transform: it is {structures[0]}, and tx.init makes {structures[1]}. Make "
            "the state with init_train_state and the transform of the step."
        )


def check_unstacked(tx: optax.GradientTransformation, state: TrainState) -> None:
    """Raise for parameters that cannot be trained, the state of stacked layers or of another transform, or a loss scale.

    Raises:
        InvalidArgumentError, UnsupportedTensorError.
    """
    check_train_state(state)
    if isinstance(state.opt_state, LayeredState):
        raise InvalidArgumentError(
            "this optimizer state has a layer axis, for make_release_step; make the state for make_train_step with "
            "init_train_state(tx, params, stack=False)."
        )
    if state.loss_scale is not None:
        raise InvalidArgumentError("make_train_step does not scale the loss; leave loss_scale out of init_train_state.")
    check_floating(state.params)
    check_made_by(tx, state.params, state.opt_state)
