r"""Releasing the gradients of stacked layers in a loop that the caller writes.

The reverse walk owns the loop over the layers. Here the caller does: a `lax.scan` (or a Python loop) inside the loss calls
one layer after the other by its index, with any computation between them. The stacked parameters and their optimizer
state are in references (`jax.new_ref`); a layer's forward pass reads its slice, and its backward pass computes its
gradient, writes the updated slice in place, and returns no gradient.

An update in place cannot be undone, so the number of times that the backward pass reaches each layer has to be known before.
It is found when the step is traced, by layers that only count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.extend import core as jaxpr_types

from ..core.errors import InvalidArgumentError, MissingDependencyError, RefusedError
from .dependencies import flow
from .direct import apply_directly, as_transformation
from .donation import DonatingFunction
from .losses import scaled_loss
from .norms import global_norm, norm_dtype
from .separability import check_separable
from .state import PyTree
from .train_state import LayeredState, TrainState, check_made_by, check_train_state
from .walk.fence import fenced, resolve_fence
from .walk.layer_stack import check_layer_axis, looks_stacked, number_of_layers


class ReleasedLayers:
    """The layers as `loss_fn` gets them: `layers(index, *inputs)` calls `layer(parameters of layer index, *inputs)`.

    index: a Python integer or a 0-d integer array. inputs: pytrees; the floating-point ones are differentiated.
    """

    def __init__(self, call: Callable[..., PyTree], count: int) -> None:
        self._call, self._count = call, count

    def __len__(self) -> int:
        return self._count

    @property
    def indices(self) -> jax.Array:
        """Indices of all layers, for a scan over them: [layers], int32."""
        return jnp.arange(self._count, dtype=jnp.int32)

    def __call__(self, index: Any, *inputs: PyTree) -> PyTree:
        """Call one layer.

        Raises:
            InvalidArgumentError: an index that is not a single integer.
        """
        if jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise InvalidArgumentError(
                f"layers(index, ...) was called with an index of shape {jnp.shape(index)} and dtype {jnp.result_type(index)}; "
                "it must be a single integer, as layers.indices gives them to a scan."
            )
        return self._call(jnp.asarray(index, jnp.int32), *inputs)


def release_layers(
    loss_fn: Callable[[PyTree, ReleasedLayers, PyTree], Any],
    layer: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    *,
    fence: str = "auto",
) -> DonatingFunction:
    r"""Return a jitted training step (state, batch) -> (state, metrics) for a loss function with its own loop over layers.

        def loss_fn(outer, layers, batch):
            x = outer["embedding"][batch["tokens"]]
            x, _ = jax.lax.scan(lambda x, index: (layers(index, x), None), x, layers.indices)
            return cross_entropy(x @ outer["embedding"].T, batch["targets"])

        step = release_layers(loss_fn, layer, optimizer)
        state = init_train_state(optimizer, {"outer": outer, "layers": layers})

    The result is that of the plain gradient and one update of each layer by itself, as in `make_release_step`, and so is
    the memory: one layer's gradient is alive, and a layer is computed again going backward (no jax.checkpoint around it is
    needed). `make_release_step` also has micro-batches, clipping and loss scaling. This is for models that do not fit it.

    Args:
        loss_fn: (outer, layers, batch) -> the mean loss, a floating-point scalar. It is traced twice, and must use each
            layer exactly once, not inside of lax.cond, in an order that depends on neither outer nor batch.
        layer: (layer_params, *inputs) -> any tree.
        tx: an Optax transform that can be applied layer by layer (`check_separable`).
        fence: what separates reads of old slices from writes of new ones, as for `make_release_step`.

    Returns:
        A jitted function, with .lower and .trace, that donates its state, which comes from `init_train_state`. metrics are
        0-d arrays: "loss", before the update; "grad_norm", the global norm; "skipped", always False.

    Raises:
        MissingDependencyError: this jax has no references (jax.new_ref).
        InvalidArgumentError: something is not callable, or tx is not a transform; when traced, a state without a layer axis or
            of another transform, or a loss that is not a scalar; at a step, an array that was deleted, or is to be donated
            twice.
        RefusedError: when traced, a transform that is not separable; a layer that the backward pass reaches more than once or
            never (not used, or before jax.lax.stop_gradient), that does not exist, is chosen by the data, or called under
            jax.vmap.
    """
    if not hasattr(jax, "new_ref"):
        raise MissingDependencyError(
            f"release_layers needs references, which jax {jax.__version__} does not have as jax.new_ref; install a newer jax, "
            "or use make_release_step."
        )
    for name, function in (("loss_fn", loss_fn), ("layer", layer)):
        if not callable(function):
            raise InvalidArgumentError(f"{name}={function!r} is not callable.")
    as_transformation(tx)  # raises
    resolve_fence(fence)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        outer, layers = _checked(tx, state)
        count, dtype = number_of_layers(layers), norm_dtype(state.params)
        _check_visits(_visits(loss_fn, layer, outer, layers, batch))
        references = jax.tree.map(jax.new_ref, (layers, state.opt_state.layers))

        def loss(outer: PyTree, norms: jax.Array) -> Any:
            call = functools.partial(_released(layer, tx, references, resolve_fence(fence)), norms)
            return scaled_loss(loss_fn)(outer, ReleasedLayers(call, count), batch)

        # The derivative with respect to `norms` is the norm of each layer's gradient, from the layers' own backward passes.
        # Asking for it makes these run, whatever else is differentiated.
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, returned), (g, norms) = gradient(outer, jnp.zeros(count, dtype))
        if returned.weight is not None:
            raise InvalidArgumentError(
                "loss_fn returned a tuple; it must return the mean loss, a scalar: divide by the weight in it."
            )
        new_layers, new_states = jax.tree.map(lambda reference: reference[...], references)
        new_outer, outer_state = apply_directly(tx, g, state.opt_state.outer, outer)
        metrics = {"loss": returned.total, "grad_norm": global_norm((g, norms)), "skipped": jnp.asarray(False)}
        return TrainState({"outer": new_outer, "layers": new_layers}, LayeredState(outer_state, new_states)), metrics

    return DonatingFunction(step, "state")


def _checked(tx: optax.GradientTransformation, state: TrainState) -> tuple[PyTree, PyTree]:
    """Check a state, and return its outer parameters and its stacked layers."""
    check_train_state(state)
    params = state.params
    if not looks_stacked(params) or not isinstance(state.opt_state, LayeredState) or state.loss_scale is not None:
        raise InvalidArgumentError(
            'the state must be that of init_train_state(tx, {"outer": ..., "layers": ...}), without a loss scale: '
            "release_layers takes one stack of layers."
        )
    check_layer_axis(params["layers"])
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    outer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params["outer"])
    for tree, opt_state in ((one, state.opt_state.layers), (outer, state.opt_state.outer)):
        check_made_by(tx, tree, opt_state)
        check_separable(tx, tree)
    return params["outer"], params["layers"]


def _released(
    layer: Callable[..., PyTree], tx: optax.GradientTransformation, references: PyTree, fence: str
) -> Callable[..., PyTree]:
    """Return a function (norms, index, *inputs) to the layer's output, whose backward pass updates the layer."""
    count = number_of_layers(references)

    def read(references: PyTree, index: jax.Array) -> PyTree:
        return jax.tree.map(lambda reference: reference[index], references)

    @jax.custom_vjp
    def call(references: PyTree, norms: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> PyTree:
        return layer(read(references[0], index), *inputs)

    def forward(references: PyTree, norms: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> tuple[PyTree, Any]:
        return layer(read(references[0], index), *inputs), (references, norms, index, inputs)

    def backward(saved: Any, cotangent: PyTree) -> tuple[Any, ...]:
        references, norms, index, inputs = saved
        old = read(references, index)
        _, pullback = jax.vjp(layer, old[0], *inputs)
        g, *d_inputs = pullback(cotangent)

        def update(old: PyTree, g: PyTree) -> PyTree:
            return apply_directly(tx, g, old[1], old[0])

        new = fenced(fence, update, old, g, always=index < count)
        jax.tree.map(lambda reference, leaf: reference.__setitem__(index, leaf), references, new)
        norm = _one_hot(index, count, global_norm(g).astype(norms.dtype))
        return None, norm, None, tuple(d_inputs)

    call.defvjp(forward, backward)
    return lambda norms, index, *inputs: call(references, norms, index, inputs)


def _one_hot(index: jax.Array, count: int, value: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(count) == index, value, jnp.zeros((), value.dtype))


# --- how often the backward pass reaches each layer


def _counted(layer: Callable[..., PyTree], layers: PyTree) -> Callable[..., PyTree]:
    """Return a function (visits, index, *inputs) to zeros like the layer's output; the derivative of `visits` is the count."""
    count = number_of_layers(layers)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)

    def output(*inputs: PyTree) -> PyTree:
        return jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), jax.eval_shape(layer, one, *inputs))

    @jax.custom_vjp
    def call(visits: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> PyTree:
        return output(*inputs)

    def forward(visits: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> tuple[PyTree, Any]:
        return output(*inputs), (_not_vectorised(index, inputs), inputs)

    def backward(saved: Any, cotangent: PyTree) -> tuple[Any, ...]:
        index, inputs = saved
        visited = jnp.where((index >= 0) & (index < count), index, count)
        return _one_hot(visited, count + 1, jnp.ones(())), None, jax.vjp(output, *inputs)[1](cotangent)

    call.defvjp(forward, backward)
    return lambda visits, index, *inputs: call(visits, index, inputs)


def _visits(
    loss_fn: Callable[..., Any], layer: Callable[..., PyTree], outer: PyTree, layers: PyTree, batch: PyTree
) -> np.ndarray:
    """Return how often the backward pass of the loss reaches each layer and, at the end, layers that do not exist.

    Raises:
        RefusedError: the number depends on the parameters or the batch.
    """
    count = number_of_layers(layers)
    none = jnp.zeros(count + 1)

    def loss(visits: jax.Array, outer: PyTree, batch: PyTree) -> jax.Array:
        call = functools.partial(_counted(layer, layers), visits)
        return scaled_loss(loss_fn)(outer, ReleasedLayers(call, count), batch)[0]

    traced = jax.make_jaxpr(jax.grad(loss))(none, outer, batch)
    marks = [0, *([1] * len(jax.tree.leaves(outer))), *([2] * len(jax.tree.leaves(batch)))]
    (depends,) = flow(traced.jaxpr, marks)
    if depends:
        raise RefusedError(
            f"{'outer' if depends & 1 else 'batch'} decides which layers loss_fn uses, but release_layers has to know it when "
            "the step is traced: every layer is updated in place exactly once. Use all layers in a fixed order; to drop "
            "one, use it and then multiply what it adds by 0."
        )

    def evaluated() -> jax.Array:
        # The result does not depend on the inputs, so any will do; XLA removes them and what reads them.
        return jaxpr_types.jaxpr_as_fun(traced)(*map(_any_like, jax.tree.leaves((none, outer, batch))))[0]

    return np.asarray(jax.jit(evaluated).lower().compile()())


def _any_like(leaf: Any) -> jax.Array:
    """Return zeros of the same shape and dtype; for PRNG keys some keys."""
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(leaf)), leaf.shape)
    return jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))


@custom_vmap
def _not_vectorised(index: jax.Array, inputs: tuple[PyTree, ...]) -> jax.Array:
    return index


@_not_vectorised.def_vmap
def _refuse_vmap(*_: Any) -> Any:
    raise RefusedError(
        "a layer of release_layers is called under jax.vmap, which would update it once for each of the mapped inputs. Give "
        "the layer the whole batch, or use jax.vmap inside of the layer."
    )


def _check_visits(counted: np.ndarray) -> None:
    """Raise `RefusedError` unless each layer is reached exactly once, and no other index."""
    visits, outside = counted[:-1], counted[-1]
    if outside:
        raise RefusedError(
            f"the backward pass reaches a layer that does not exist: there are {len(visits)}, and an index must be in "
            f"[0, {len(visits)}). Use each of layers.indices once."
        )
    often, never = np.flatnonzero(visits > 1), np.flatnonzero(visits < 1)
    if often.size:
        raise RefusedError(
            f"the backward pass reaches layer {often[0]} {visits[often[0]]:g} times, but it can be updated in place only "
            "once. Use each index once; put what shares parameters into one layer that applies them several times."
        )
    if never.size:
        raise RefusedError(
            f"the backward pass never reaches layer {never[0]}, which would not be updated. Use all of layers.indices, "
            "and no jax.lax.stop_gradient after a layer; put layers that are not trained into outer."
        )
