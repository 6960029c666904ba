r"""Releasing the gradients of stacked layers in a loop that the caller writes.

The reverse walk owns the loop over the layers. Here the caller does: a `lax.scan` (or a Python loop) inside the loss calls
one layer after the other by its index, with any computation between them. The stacked parameters and their optimizer
state are in references (`jax.new_ref`); a layer's forward pass reads its slice, and its backward pass computes its
gradient, writes the updated slice in place, and returns no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.errors import InvalidArgumentError, MissingDependencyError, RefusedError
from .direct import apply_directly, as_transformation
from .donation import DonatingFunction
from .functions import check_takes
from .losses import scaled_loss, with_aux
from .norms import global_norm, norm_dtype
from .released_layers import ReleasedLayers, check_counts, count_visits, one_hot
from .separability import check_separable
from .sharding import sharded_like
from .state import PyTree
from .train_state import LayeredState, TrainState, check_made_by, check_train_state
from .walk.fence import fenced, resolve_fence
from .walk.layer_stack import check_layer_axis, looks_stacked, number_of_layers


def release_layers(
    loss_fn: Callable[[PyTree, ReleasedLayers, PyTree], Any],
    layer: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    *,
    fence: str = "auto",
    has_aux: bool = False,
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
        has_aux: loss_fn returns (loss, aux), as for jax.grad, and the metrics have "aux": any tree of arrays, which is not
            differentiated.

    Returns:
        A jitted function, with .lower and .trace, that donates its state, which comes from `init_train_state`. metrics are
        0-d arrays: "loss", before the update; "grad_norm", the global norm; "skipped", always False.

    Raises:
        MissingDependencyError: this jax has no references (jax.new_ref).
        InvalidArgumentError: something is not callable, loss_fn takes other arguments, or tx is not a transform; when traced,
            a state without a layer axis or of another transform, or a loss that is not a scalar; at a step, an array that was
            deleted, or is to be donated twice.
        RefusedError: when traced, a transform that is not separable; layers that are sharded over explicit mesh axes; a layer
            that the backward pass reaches more than once or never (not used, or before jax.lax.stop_gradient), that does not
            exist, is chosen by the data, called under jax.vmap, differentiated by loss_fn itself, or read again after its
            update (under jax.lax.stop_gradient inside of jax.checkpoint).
    """
    if not hasattr(jax, "new_ref"):
        raise MissingDependencyError(
            f"release_layers needs references, which jax {jax.__version__} does not have as jax.new_ref; install a newer jax, "
            "or use make_release_step."
        )
    check_takes("loss_fn", loss_fn, "outer, layers, batch")
    if not callable(layer):
        raise InvalidArgumentError(f"layer={layer!r} is not callable.")
    as_transformation(tx)  # raises
    resolve_fence(fence)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        outer, layers = _checked(tx, state)
        count, dtype = number_of_layers(layers), norm_dtype(state.params)
        check_counts(count_visits(scaled_loss(loss_fn, has_aux), layer, outer, layers, batch))
        references = jax.tree.map(jax.new_ref, (layers, state.opt_state.layers))

        def loss(outer: PyTree, norms: jax.Array) -> Any:
            call = functools.partial(_released(layer, tx, references, resolve_fence(fence)), norms)
            return scaled_loss(loss_fn, has_aux)(outer, ReleasedLayers(call, count), batch)

        # The derivative with respect to `norms` is the norm of each layer's gradient, from the layers' own backward passes.
        # Asking for it makes these run, whatever else is differentiated.
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, returned), (g, norms) = gradient(outer, jnp.zeros(count, dtype))
        if returned.weight is not None:
            raise InvalidArgumentError(
                "loss_fn returned a WeightedMean; it must return the mean loss, a scalar: divide by the weight in it."
            )
        new_layers, new_states = jax.tree.map(lambda reference: reference[...], references)
        new_outer, outer_state = apply_directly(tx, g, state.opt_state.outer, outer)
        metrics = {"loss": returned.total, "grad_norm": global_norm((g, norms)), "skipped": jnp.asarray(False)}
        new = TrainState({"outer": new_outer, "layers": new_layers}, LayeredState(outer_state, new_states))
        return sharded_like(new, state), with_aux(metrics, has_aux, returned.aux)

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
    if any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(params["layers"])):
        raise RefusedError(
            "the layers are sharded over explicit mesh axes, and jax cannot read one layer from a reference that is sharded "
            "so; use a mesh of AxisType.Auto, or make_release_step."
        )
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
        norm = one_hot(index, count, global_norm(g).astype(norms.dtype))
        return None, norm, None, tuple(d_inputs)

    call.defvjp(forward, backward)
    return lambda norms, index, *inputs: call(references, norms, index, inputs)
