r"""Checking that a transform can be applied layer by layer: to each layer alone, as soon as its gradient exists.

For two layers a and b, with gradients g, states s and parameters p, a transform is separable when

    update((g_a, g_b), (s_a, s_b), (p_a, p_b)) = (update(g_a, s_a, p_a), update(g_b, s_b, p_b))

Two checks follow. In the traced computation no output of one layer may depend on another one, nor through the state after
any number of updates. And a few small updates are compared as numbers, since some transforms differ without a dependency: noise
that is drawn for the whole tree at once, a count of the leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..core.dtypes import compute_dtype
from ..core.errors import InvalidArgumentError, PenstockError, RefusedError
from .array_ops import check_floating
from .dependencies import flow
from .direct import as_transformation
from .evaluation import evaluate
from .random_bits import with_equal_keys
from .state import PyTree

_LAYERS = 2
_STEPS = 3
_LONGEST_AXIS = 4
"""Of the parameters of the small updates."""

_REMEDY = (
    "Remedy: leave out what computes one number from all parameters, or train with make_train_step, which takes any transform. "
    "Use max_norm= of the training step instead of optax.clip_by_global_norm; optax.zero_nans instead of apply_if_finite; "
    "optax.clip_by_block_rms instead of optax.normalize_by_update_norm; noise inside the layer instead of optax.add_noise; and "
    "an optimizer with a learning_rate instead of one that finds its step size by all parameters (prodigy, lbfgs)."
)
"""For all refusals: what is inside of a transform cannot be seen."""

_MASKS = (
    "Remedy: give masks and labels as functions of the parameters, such as "
    "lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)."
)
_MASK_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of a transform whose mask is for another tree."""


def check_takes(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise `RefusedError` unless tx.init takes the parameters of a layer, or the outer ones, by themselves.

    Args:
        params: arrays or jax.ShapeDtypeStructs, of one layer.
    """
    try:
        jax.eval_shape(as_transformation(tx).init, params)
    except PenstockError:
        raise
    except _MASK_ERRORS as error:
        raise RefusedError(
            "tx.init fails on a part of the parameters: where each layer is updated by itself, a transform gets the tree of "
            "one layer, or the outer parameters, and a mask or labels for all of them do not fit "
            f"({error_line(error)}). {_MASKS}"
        ) from error


def error_line(error: Exception) -> str:
    """Return the text of an error in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def check_separable(tx: optax.GradientTransformation, params: PyTree, **extra_args: Any) -> None:
    """Raise unless updating several layers together equals updating each of them alone.

    Only structure, shapes and dtypes of params are used; the computation is small.

    Args:
        tx: any Optax transform.
        params: the parameters of one layer, or all parameters; arrays or jax.ShapeDtypeStructs.
        extra_args: what tx.update needs besides, the same for all layers.

    Raises:
        RefusedError: an update or the state of one layer depends on the others (optax.clip_by_global_norm,
            optax.apply_if_finite), or comes out differently for a layer alone (noise), or an update needs extra arguments
            that are not given (optax.lbfgs).
        InvalidArgumentError: tx.update returns a state of other shapes than tx.init.
        UnsupportedTensorError: a parameter that is not a floating-point array.

    Example:
        check_separable(optax.adamw(1e-3), layer_params)
    """
    check_floating(params)
    leaves, treedef = jax.tree.flatten(params)
    kinds = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    if not leaves:
        return
    if extra_args or not _hashable(tx):
        _check(tx, treedef, kinds, extra_args)
    else:
        _check_once(tx, treedef, kinds)


def _hashable(tx: Any) -> bool:
    try:
        hash(tx)
    except TypeError:
        return False
    return True


def _check(tx: Any, treedef: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...], extra_args: dict[str, Any]) -> None:
    tx = as_transformation(tx)
    layer = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    _check_update(tx, layer, extra_args)
    join = _joining(tx, layer, extra_args)
    if _entangled(tx, layer, join, extra_args):
        raise RefusedError(_refusal("what it does to one layer depends on the other layers"))
    if _differs(tx, layer, join, extra_args):
        raise RefusedError(_refusal("it updates a layer alone differently from the same layer among others"))


@functools.lru_cache(maxsize=32)
def _check_once(tx: Any, treedef: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...]) -> None:
    """Check once: a step is traced again for every shape of its batch."""
    _check(tx, treedef, kinds, {})


def _refusal(reason: str) -> str:
    return f"tx cannot be applied layer by layer: {reason}. {_REMEDY}"


# --- two layers as one tree


def _tuples_of_leaves(layers: Sequence[PyTree]) -> PyTree:
    """Join layers to a tree of tuples over the layers; masks and labels with the structure of one layer still fit."""
    return jax.tree.map(lambda *leaves: leaves, *layers)


def _tuple_of_layers(layers: Sequence[PyTree]) -> PyTree:
    """Join layers to a tuple of layers; functions of the names of leaves still find them last in the path."""
    return tuple(layers)


def _labelled(layer: PyTree, join: Callable[..., PyTree]) -> PyTree:
    """Return the joined layers with the index of its layer for each leaf."""
    return join([jax.tree.map(lambda _, index=index: index, layer) for index in range(_LAYERS)])


def _joining(tx: optax.GradientTransformation, layer: PyTree, extra_args: dict[str, Any]) -> Callable[..., PyTree]:
    """Return the first way of joining layers that tx accepts."""
    for join in (_tuples_of_leaves, _tuple_of_layers):
        try:
            jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, **extra_args), join([layer] * _LAYERS))
        except _MASK_ERRORS:
            continue
        return join
    raise RefusedError(
        f"tx accepts one layer, but not two of them in one tree, so that applying it layer by layer cannot be checked. {_MASKS}"
    )


def _check_update(tx: optax.GradientTransformation, layer: PyTree, extra_args: dict[str, Any]) -> None:
    """Raise unless tx.init and tx.update accept a layer, and the state keeps its structure and shapes."""
    check_takes(tx, layer)
    before = jax.eval_shape(tx.init, layer)
    try:
        _, after = jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **extra_args), layer, before, layer)
    except PenstockError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(("the gradient, the state and the parameters", *extra_args))
        raise RefusedError(_refusal(f"its update fails when it is given {given} ({error_line(error)})")) from error
    shapes = [jax.tree.map(jnp.shape, state) for state in (before, after)]
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError("tx.update returns a state of another structure, or with other shapes, than tx.init made.")


# --- dependencies


def _entangled(
    tx: optax.GradientTransformation, layer: PyTree, join: Callable[..., PyTree], extra_args: dict[str, Any]
) -> bool:
    """Return whether an output of an update, now or later, depends on more than one layer."""
    both = join([layer] * _LAYERS)
    own = [1 << index for index in jax.tree.leaves(_labelled(layer, join))]
    made, state_shape = jax.make_jaxpr(tx.init, return_shape=True)(both)
    updated = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p, **extra_args))(both, state_shape, both).jaxpr
    state = flow(made.jaxpr, own)
    while True:
        out = flow(updated, [*own, *state, *own])
        grown = [before | after for before, after in zip(state, out[len(own) :], strict=True)]
        if grown == state:
            break
        state = grown
    return any(marks.bit_count() > 1 for marks in (*out, *state))


# --- numbers


def _differs(tx: optax.GradientTransformation, layer: PyTree, join: Callable[..., PyTree], extra_args: dict[str, Any]) -> bool:
    """Return whether a few updates of a small layer among others differ by more than rounding from those of it alone."""
    labels = jax.tree.leaves(_labelled(layer, join))

    def small(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(min(length, _LONGEST_AXIS) for length in leaf.shape), leaf.dtype)

    def largest_distance(layers: list[PyTree], grads: list[PyTree]) -> jax.Array:
        def step(states: Any, gradients: list[PyTree]) -> tuple[Any, Any]:
            updates, together = tx.update(join(gradients), states[0], join(layers), **extra_args)
            update, alone = tx.update(gradients[-1], states[1], layers[-1], **extra_args)
            return jax.tree.map(_like, (together, alone), states), (updates, update)

        start = with_equal_keys(tx.init(join(layers))), with_equal_keys(tx.init(layers[-1]))
        _, (updates, update) = lax.scan(step, start, grads)
        among = [leaf for leaf, layer in zip(jax.tree.leaves(updates), labels, strict=True) if layer == _LAYERS - 1]
        return jnp.max(jnp.stack([_distance(*pair) for pair in zip(among, jax.tree.leaves(update), strict=True)]))

    generator = np.random.default_rng(0)

    def numbers(scale: float, *axes: int) -> PyTree:
        like = jax.tree.map(small, layer)
        return jax.tree.map(lambda leaf: (generator.normal(size=(*axes, *leaf.shape)) * scale).astype(leaf.dtype), like)

    layers = [numbers(1.0) for _ in range(_LAYERS)]
    grads = [numbers(10.0**index, _STEPS) for index in range(_LAYERS)]
    for leaf in jax.tree.leaves(grads):
        leaf[1] = 0.0  # so that noise added to the gradient shows
    (distance,) = evaluate(largest_distance, layers, grads)
    return not distance <= 1.0  # true of NaN


def _like(new: Any, old: Any) -> Any:
    """Return `new` in the dtype of `old`, as the carry of a loop must be."""
    return new if jnp.result_type(new) == jnp.result_type(old) else jnp.asarray(new, jnp.result_type(old))


def _distance(together: jax.Array, alone: jax.Array) -> jax.Array:
    """Return the largest difference relative to the largest number of the same step, in units of sqrt(eps)."""
    wide = compute_dtype(alone.dtype.name)
    digits = float(jnp.finfo(alone.dtype).eps) ** 0.5
    a, b = (jnp.reshape(each, (_STEPS, -1)).astype(wide) for each in (together, alone))
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    largest = jnp.maximum(jnp.max(jnp.abs(b), axis=1, keepdims=True, initial=0.0), jnp.finfo(wide).tiny)
    ratio = jnp.abs(a - b) / largest / digits  # in this order: the smallest number times digits is zero
    return jnp.max(jnp.where(same, 0.0, ratio), initial=0.0).astype(jnp.float32)
