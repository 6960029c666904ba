"""The layers that the loss function of `release_layers` calls, and how often it uses each.

An update in place cannot be undone, so it has to be known before that each layer is updated once, and not read afterwards.
That is found when the step is traced, by layers that only count: they read and update references of counts.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core as jaxpr_types

from ..core.errors import InvalidArgumentError, RefusedError
from .array_ops import zeros_of
from .dependencies import flow
from .evaluation import evaluate
from .state import PyTree
from .walk.layer_stack import number_of_layers


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


def one_hot(index: jax.Array, count: int, value: jax.Array) -> jax.Array:
    """Return zeros of shape [count] with a value at an index."""
    return jnp.where(jnp.arange(count) == index, value, jnp.zeros((), value.dtype))


_UNDIFFERENTIABLE = re.compile("AbstractRef|State effect|custom_lin|forward-mode")
"""In jax's errors for references inside of a conditional, and for forward-mode derivatives of a layer."""


class Counts(NamedTuple):
    """Of each layer; the last one of the arrays is for layers that do not exist."""

    visits: np.ndarray  # by the backward pass of the loss
    updates: np.ndarray  # by all backward passes, those inside the loss, too
    late_reads: np.ndarray  # positive where a layer is read after an update


def _counted(layer: Callable[..., PyTree], layers: PyTree) -> Callable[..., PyTree]:
    """Return a function (references, visits, index, *inputs) to zeros like the layer's output.

    The derivative of `visits` are the visits; the references are of the other two of `Counts`.
    """
    count = number_of_layers(layers)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)

    def output(*inputs: PyTree) -> PyTree:
        return zeros_of(jax.eval_shape(layer, one, *inputs))

    @jax.custom_vjp
    def call(references: Any, visits: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> PyTree:
        return output(*inputs)

    def forward(references: Any, visits: jax.Array, index: jax.Array, inputs: tuple[PyTree, ...]) -> tuple[PyTree, Any]:
        updates, late_reads = references
        index = _not_vectorised(jnp.where((index >= 0) & (index < count), index, count), inputs)
        late_reads[index] += updates[index]
        return output(*inputs), (updates, index, inputs)

    def backward(saved: Any, cotangent: PyTree) -> tuple[Any, ...]:
        updates, index, inputs = saved
        updates[index] += 1
        return None, one_hot(index, count + 1, jnp.ones(())), None, jax.vjp(output, *inputs)[1](cotangent)

    call.defvjp(forward, backward)
    return lambda references, visits, index, *inputs: call(references, visits, index, inputs)


def count_visits(
    loss_fn: Callable[..., Any], layer: Callable[..., PyTree], outer: PyTree, layers: PyTree, batch: PyTree
) -> Counts:
    """Return the counts of one step.

    Args:
        loss_fn: of `scaled_loss`.
        layer, outer, layers, batch: of the step.

    Raises:
        RefusedError: they depend on the parameters or the batch.
    """
    count = number_of_layers(layers)
    none = jnp.zeros(count + 1)

    def counts(none: jax.Array, outer: PyTree, batch: PyTree) -> tuple[jax.Array, ...]:
        references = [jax.new_ref(jnp.zeros(count + 1, jnp.int32)) for _ in range(2)]

        def loss(visits: jax.Array) -> jax.Array:
            call = functools.partial(_counted(layer, layers), references, visits)
            return loss_fn(outer, ReleasedLayers(call, count), batch)[0]

        return jax.grad(loss)(none), *(reference[...] for reference in references)

    try:
        traced = jax.make_jaxpr(counts)(none, outer, batch)
    except (KeyError, NotImplementedError, TypeError) as error:
        if not _UNDIFFERENTIABLE.search(str(error)):
            raise
        raise RefusedError(
            "a layer of release_layers is called inside of lax.cond, lax.switch or jax.jvp, through which jax cannot "
            "differentiate it. Call it outside and choose between results (to drop a layer, multiply what it adds by 0), or "
            "put lax.cond into the layer."
        ) from error
    marks = [0, *([1] * len(jax.tree.leaves(outer))), *([2] * len(jax.tree.leaves(batch)))]
    depends = functools.reduce(operator.or_, flow(traced.jaxpr, marks))
    if depends:
        raise RefusedError(
            f"{'outer' if depends & 1 else 'batch'} decides which layers loss_fn uses, but release_layers has to know it when "
            "the step is traced: every layer is updated in place exactly once. Use all layers in a fixed order; to drop "
            "one, use it and then multiply what it adds by 0."
        )

    def evaluated() -> list[jax.Array]:
        # The result does not depend on the inputs, so any will do; XLA removes them and what reads them.
        return jaxpr_types.jaxpr_as_fun(traced)(*map(_any_like, jax.tree.leaves((none, outer, batch))))

    return Counts(*evaluate(evaluated))


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


def check_counts(counts: Counts) -> None:
    """Raise `RefusedError` unless each layer is updated once, by the backward pass of the loss, and not read afterwards."""
    differentiated = np.flatnonzero(counts.updates != counts.visits)
    if differentiated.size:
        raise RefusedError(
            f"loss_fn differentiates layer {differentiated[0]} itself (jax.grad or jax.vjp inside of it), which would update "
            "it before the backward pass of the loss. Compute what needs that derivative, such as adversarial inputs, before "
            "the step, from state.params, and give it as part of the batch; or train with make_train_step."
        )
    visits, outside = counts.visits[:-1], counts.visits[-1]
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
    late = np.flatnonzero(counts.late_reads)
    if late.size:
        raise RefusedError(
            f"the backward pass reads layer {late[0]} again after its update: it is also called under jax.lax.stop_gradient "
            "inside of jax.checkpoint, which computes that a second time. Make that call outside of jax.checkpoint; a layer "
            "of release_layers needs none."
        )
