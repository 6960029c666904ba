"""The model of the reverse walk: a function for what comes before the layers, one for a layer, one for what comes after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from ..functions import check_takes
from ..state import PyTree
from .stacked import is_floating

SOLE = "layers"
"""The name of the only stack of a model."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """One stack of equal layers.

    Args:
        layer: (layer_params, x[, context][, inputs]) -> x of the same structure, shapes and dtypes; with auxiliary,
            -> (x, auxiliary). x is a tree of floating-point arrays.
        enter: (outer, x, batch) -> x, before the first of these layers; x is what came before: of `LayerStack.embed`, or of
            the previous stack. None: the same x.
        context: (outer, x, batch) -> a tree that all these layers read, computed from the same x as enter: positions, a
            mask, the encoder's output. It is differentiated where it is floating-point. None: there is no such argument.
        inputs: (batch) -> a tree of each layer's own inputs, not differentiated: every leaf has a leading layer axis, or
            is a single typed PRNG key (jax.random.key), which is split: two stacks need a key each. None: there is no such
            argument.
        auxiliary: layer returns (x, auxiliary), a tree of arrays (a router's loss); `LayerStack.loss` gets those of all
            layers, with a leading layer axis, and they are differentiated.
    """

    layer: Callable[..., Any]
    enter: Callable[..., Any] | None = None
    context: Callable[..., Any] | None = None
    inputs: Callable[..., Any] | None = None
    auxiliary: bool = False


def layer_inputs(layers: Layers, batch: PyTree, count: int) -> PyTree:
    """Return what `Layers.inputs` gives for all `count` layers: every leaf with a layer axis; None where there are no inputs.

    Raises:
        InvalidArgumentError: a leaf has no axis of `count` layers.
    """
    if layers.inputs is None:
        return None

    def split(path: Any, leaf: Any) -> Any:
        shape = jnp.shape(leaf)
        if not shape and jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf, count)
        if not shape or shape[0] != count:
            raise InvalidArgumentError(
                f"inputs(batch){jax.tree_util.keystr(path)} has shape {shape}; it must have a leading axis of the "
                f"{count} layers, or be a typed PRNG key. Return what is the same for all layers from context instead."
            )
        return jnp.asarray(leaf)

    return jax.tree_util.tree_map_with_path(split, layers.inputs(batch))


def apply_layer(layers: Layers, layer_params: PyTree, x: PyTree, context: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
    """Apply one layer and return (x, auxiliary); auxiliary is None where there is none.

    Raises:
        InvalidArgumentError: when traced, if the layer changes the structure, a shape or a dtype of x, or x has leaves that
            are not floating-point.
    """
    arguments = [value for used, value in ((layers.context, context), (layers.inputs, inputs)) if used is not None]
    returned, auxiliary = layers.layer(layer_params, x, *arguments), None
    if layers.auxiliary:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise InvalidArgumentError("a layer with auxiliary=True must return a tuple (x, auxiliary).")
        returned, auxiliary = returned
        if not all(is_floating(leaf) for leaf in jax.tree.leaves(auxiliary)):
            raise InvalidArgumentError("a layer's auxiliary output must be floating-point arrays; cast it with astype.")
    _check_carry(x, returned)
    return returned, auxiliary


def _check_carry(before: PyTree, after: PyTree) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] != structures[1]:
        raise InvalidArgumentError(
            f"the layer makes {structures[1]} of {structures[0]}; all layers of a stack must return "
            "the structure they are given: x alone, where the body of a lax.scan returns (x, None); with auxiliary=True "
            "(x, auxiliary)."
        )
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        name = f"x{jax.tree_util.keystr(path)}"
        if not is_floating(old):
            raise InvalidArgumentError(
                f"{name}, which passes through the layers, has dtype {jnp.asarray(old).dtype}; only floating-point arrays can. "
                "Give others to the layers as context or inputs."
            )
        was, now = ((jnp.shape(leaf), jnp.asarray(leaf).dtype) for leaf in (old, new))
        if was != now:
            raise InvalidArgumentError(
                f"the layer makes {now[1]}{list(now[0])} of {name}, which is {was[1]}{list(was[0])}; all layers of a stack "
                "must return the shapes and dtypes they are given: cast or reshape in embed, enter, or at the layer's end."
            )


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """A model whose layers are stacked: params = {"outer": ..., "layers": ...}.

    The leaves of params["layers"] have a leading layer axis; params["outer"] is any tree. A parameter that is used both
    before and after the layers (tied embeddings) is simply read in both places. Called, it is the model's loss as a plain
    differentiable function (params, batch) -> what `loss` returns.

    Args:
        embed: (outer, batch) -> x, a tree of floating-point arrays.
        layer: (layer_params, x) -> x; or `Layers`, where a layer has more inputs or outputs; or {name: one of both}, several
            stacks that follow each other in this order. params["layers"] is then {name: stacked layers}.
        loss: (outer, x, batch) -> the mean loss, a floating-point scalar; or -> `WeightedMean(sum, weight)`, whose mean is over
            the *whole* batch; with has_aux=True of the step a tuple (one of both, aux).
            Where layers have auxiliary outputs: (outer, x, batch, auxiliary); with several stacks {name: auxiliary}.

    Raises:
        InvalidArgumentError: something is not callable or takes other arguments, or a mapping without stacks.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any] | Layers | Mapping[str, Callable[..., Any] | Layers]
    loss: Callable[..., Any]

    def __post_init__(self) -> None:
        check_takes("embed", self.embed, "outer, batch")
        if isinstance(self.layer, Mapping) and not self.layer:
            raise InvalidArgumentError("layer={} names no stack; give at least one.")
        stacks = stacks_of(self)
        for name, layers in stacks.items():
            more = [argument for argument in ("context", "inputs") if getattr(layers, argument) is not None]
            named = f"layer[{name!r}]" if isinstance(self.layer, Mapping) else "layer"
            check_takes(named, layers.layer, ", ".join(["layer_params", "x", *more]))
        auxiliary = any(layers.auxiliary for layers in stacks.values())
        check_takes("loss", self.loss, "outer, x, batch, auxiliary" if auxiliary else "outer, x, batch")

    def __call__(self, params: PyTree, batch: PyTree) -> Any:
        """Return the loss over the whole batch at once."""
        outer, x, auxiliary = params["outer"], None, {}
        for name, layers in by_name(self, params["layers"]).items():
            stack = stacks_of(self)[name]
            x, context = enter_stack(self, name, outer, x, batch)
            inputs = layer_inputs(stack, batch, number_of_layers(layers))

            def body(x: PyTree, of_layer: PyTree, stack: Layers = stack, context: PyTree = context) -> Any:
                return apply_layer(stack, of_layer[0], x, context, of_layer[1])

            x, outputs = lax.scan(body, x, (layers, inputs))
            if stack.auxiliary:
                auxiliary[name] = outputs
        return model_loss(self, outer, x, batch, auxiliary)


def stacks_of(model: LayerStack) -> dict[str, Layers]:
    """Return the stacks of a model by name, in their order."""
    named = model.layer if isinstance(model.layer, Mapping) else {SOLE: model.layer}
    return {name: layer if isinstance(layer, Layers) else Layers(layer) for name, layer in named.items()}


def by_name(model: LayerStack, layers: PyTree) -> dict[str, PyTree]:
    """Return params["layers"], or a tree like it, as a dict by name of the stack."""
    return {name: layers[name] for name in model.layer} if isinstance(model.layer, Mapping) else {SOLE: layers}


def without_names(model: LayerStack, named: dict[str, PyTree]) -> PyTree:
    """Return the tree of which `by_name` made a dict."""
    return dict(named) if isinstance(model.layer, Mapping) else named[SOLE]


def enter_stack(model: LayerStack, name: str, outer: PyTree, x: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Return (x, context) of the first layer of a stack.

    Args:
        model, name: the stack.
        outer, batch: the outer parameters and the batch.
        x: what the previous stack returned; ignored for the first stack, which starts from `LayerStack.embed`.
    """
    stacks = stacks_of(model)
    if name == next(iter(stacks)):
        x = model.embed(outer, batch)
    layers = stacks[name]
    context = None if layers.context is None else layers.context(outer, x, batch)
    return x if layers.enter is None else layers.enter(outer, x, batch), context


def model_loss(model: LayerStack, outer: PyTree, x: PyTree, batch: PyTree, auxiliary: dict[str, PyTree]) -> Any:
    """Return what `LayerStack.loss` returns; auxiliary has the auxiliary outputs by name of the stack, where there are any."""
    return model.loss(outer, x, batch, without_names(model, auxiliary)) if auxiliary else model.loss(outer, x, batch)


def number_of_layers(layers: PyTree) -> int:
    """Return the length of the layer axis."""
    return int(jnp.shape(jax.tree.leaves(layers)[0])[0])


def looks_stacked(params: PyTree) -> bool:
    """Return whether params are a dict with exactly the keys "outer" and "layers"."""
    return isinstance(params, dict) and params.keys() == {"outer", "layers"}


def check_outer_and_layers(params: PyTree) -> None:
    """Raise `InvalidArgumentError` unless params are a dict of the outer parameters and the layers."""
    if not looks_stacked(params):
        found = sorted(map(str, params)) if isinstance(params, dict) else type(params).__name__
        raise InvalidArgumentError(f'params must be a dict {{"outer": ..., "layers": ...}}, but have {found}.')
    if params["outer"] is None:
        raise InvalidArgumentError('params["outer"] is None; give {} where there are no parameters outside of the layers.')


def check_parameters(stack: LayerStack, params: PyTree) -> None:
    """Raise unless params fit the model.

    Raises:
        InvalidArgumentError: other keys, or leaves without a common layer axis.
        UnsupportedTensorError: a leaf that is not a floating-point array.
    """
    check_outer_and_layers(params)
    if isinstance(stack.layer, Mapping):
        layers = params["layers"]
        if not isinstance(layers, dict) or layers.keys() != set(stack.layer):
            found = sorted(map(str, layers)) if isinstance(layers, dict) else type(layers).__name__
            raise InvalidArgumentError(
                f'params["layers"] must be a dict of the stacks {sorted(stack.layer)}, but have {found}.'
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_floating(leaf):
            raise UnsupportedTensorError(
                f"params{jax.tree_util.keystr(path)} has dtype {getattr(leaf, 'dtype', type(leaf).__name__)}; parameters must "
                "be floating-point arrays. Read others in embed, context, inputs or loss."
            )
    for name, layers in by_name(stack, params["layers"]).items():
        check_layer_axis(layers, "" if name == SOLE else name)


def check_layer_axis(layers: PyTree, name: str = "", remedy: str = "") -> None:
    """Raise unless all leaves have a leading axis of one common length, at least 1, of which one layer can be taken.

    Raises:
        InvalidArgumentError: another leading axis.
        RefusedError: it is sharded over explicit mesh axes.
    """
    root = f"params['layers']{[name] if name else ''}"
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    if not leaves:
        raise InvalidArgumentError(f"{root} has no arrays.")
    first_path, first = leaves[0]
    for path, leaf in leaves:
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != (jnp.shape(first) or (0,))[0] or not jnp.shape(leaf)[0]:
            raise InvalidArgumentError(
                f"{root}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)} and {root}"
                f"{jax.tree_util.keystr(first_path)} {jnp.shape(first)}; all need a common leading layer axis, at least 1. "
                "Stack the layers with jnp.stack, or make them with jax.vmap; other parameters belong in "
                f"params['outer'].{remedy}"
            )
        if jax.typeof(leaf).sharding.spec[0] is not None:
            raise RefusedError(
                f"{root}{jax.tree_util.keystr(path)} is sharded along the layer axis over explicit mesh axes, and jax cannot "
                "take one layer of it; shard another axis, or use a mesh of AxisType.Auto."
            )
