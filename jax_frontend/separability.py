r"""Whether a transform can be applied layer by layer: to each layer alone, as soon as its gradient is there.

For two layers a and b, with gradients g, states s and parameters p, a transform is separable when

    update((g_a, g_b), (s_a, s_b), (p_a, p_b)) = (update(g_a, s_a, p_a), update(g_b, s_b, p_b))

That is looked at twice. On the traced computation: nothing that comes out for one layer may depend on another one, through
the state neither, however many updates go by. And on numbers, for what no dependency shows: noise that is drawn for the
whole tree at once, a count of the leaves.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..core.errors import InvalidArgumentError, PenstockError, RefusedError
from .array_ops import check_floating
from .dependencies import flow
from .direct import as_transformation
from .state import PyTree

_LAYERS = 2
_STEPS = 3
_LONGEST_AXIS = 4
"""Of the parameters that numbers are tried on."""

_STEP_SIZE_OF_ALL = "it derives one step size from all parameters; use an optimizer that takes a learning_rate"
_SEARCH = "it looks along all parameters at once; use an optimizer that needs no line search"

_REMEDIES = {
    "clip_by_global_norm": "leave it out and give the training step max_norm=, which clips by the norm of all layers exactly",
    "normalize_by_update_norm": "leave it out; optax.clip_by_block_rms or optax.scale_by_trust_ratio see one array at a time",
    "apply_if_finite": "leave it out; optax.zero_nans looks at each number by itself",
    "skip_not_finite": "leave it out; optax.zero_nans looks at each number by itself",
    "skip_large_updates": "leave it out and give the training step max_norm=",
    "add_noise": "leave it out: it would draw the same noise for every layer; add noise to the gradient inside the layer",
    "noisy_sgd": "use optax.sgd: it would draw the same noise for every layer",
    "prodigy": _STEP_SIZE_OF_ALL,
    "dadapt_adamw": _STEP_SIZE_OF_ALL,
    "mechanize": _STEP_SIZE_OF_ALL,
    "scale_by_dog": _STEP_SIZE_OF_ALL,
    "scale_by_dowg": _STEP_SIZE_OF_ALL,
    "dog": _STEP_SIZE_OF_ALL,
    "dowg": _STEP_SIZE_OF_ALL,
    "momo": _STEP_SIZE_OF_ALL,
    "momo_adam": _STEP_SIZE_OF_ALL,
    "scale_by_polyak": _STEP_SIZE_OF_ALL,
    "scale_by_lbfgs": _SEARCH,
    "scale_by_backtracking_linesearch": _SEARCH,
    "scale_by_zoom_linesearch": _SEARCH,
    "sam": "it compares the parameters with those of another step as a whole; use make_train_step",
    "flatten": "leave it out: it makes one array of all layers, which changes nothing but the layout",
}
"""By the name of the function that makes the transform: what to do instead."""


_MASKS = (
    "Remedy: give masks and labels as functions of the parameters, such as "
    "lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)."
)
_MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What a transform raises whose mask is for another tree."""


def check_takes(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise `RefusedError` unless tx.init takes the parameters of a layer, or the outer ones, by themselves.

    Args:
        params: arrays or jax.ShapeDtypeStructs, of one layer.
    """
    try:
        jax.eval_shape(as_transformation(tx).init, params)
    except PenstockError:
        raise
    except _MISFITS as error:
        raise RefusedError(
            "tx.init fails on a part of the parameters: where each layer is updated by itself, a transform sees the tree of "
            f"one layer, or the outer parameters, and a mask or labels for all of them do not fit ({_line(error)}). {_MASKS}"
        ) from error


def _line(error: Exception) -> str:
    """The text of an error in one line, not too long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def check_separable(tx: optax.GradientTransformation, params: PyTree, **extra_args: Any) -> None:
    """Raise unless updating several layers together is updating each of them alone.

    Only structure, shapes and dtypes of params are looked at; what is computed is small.

    Args:
        tx: any Optax transform.
        params: the parameters of one layer, or all parameters; arrays or jax.ShapeDtypeStructs.
        extra_args: what tx.update needs besides, the same for all layers.

    Raises:
        RefusedError: an update or the state of one layer depends on the others (optax.clip_by_global_norm,
            optax.apply_if_finite), or comes out differently for a layer alone (noise), or an update needs extra arguments
            that are not given (optax.lbfgs); the text names the remedy.
        InvalidArgumentError: tx.update returns a state of other shapes than tx.init.
        UnsupportedTensorError: a parameter that is no floating-point array.
    """
    check_floating(params)
    leaves, treedef = jax.tree.flatten(params)
    kinds = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    if not leaves:
        return
    if extra_args:
        _check(tx, treedef, kinds, extra_args)
    else:
        _check_once(tx, treedef, kinds)


def _check(tx: Any, treedef: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...], extra_args: dict[str, Any]) -> None:
    tx = as_transformation(tx)
    layer = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    _check_update(tx, layer, extra_args)
    join = _joining(tx, layer, extra_args)
    if _entangled(tx, layer, join, extra_args):
        raise RefusedError(_refusal(tx, "what it does to one layer depends on the other layers"))
    if _differs(tx, layer, join, extra_args):
        raise RefusedError(_refusal(tx, "it updates a layer alone differently from the same layer among others"))


@functools.lru_cache(maxsize=32)
def _check_once(tx: Any, treedef: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...]) -> None:
    """A step is traced again for every shape of its batch; what has passed has passed."""
    _check(tx, treedef, kinds, {})


def _refusal(tx: optax.GradientTransformation, reason: str) -> str:
    known = [f"{name}: {remedy}" for name, remedy in _REMEDIES.items() if name in _makers((tx.init, tx.update))]
    remedy = "; ".join(known) or (
        "leave out what looks at all parameters at once (a global norm goes to max_norm= of the training step), or train "
        "with make_train_step, which takes any transform"
    )
    return f"tx cannot be applied layer by layer: {reason}. Remedy: {remedy}."


def _makers(functions: Iterable[Any]) -> set[str]:
    """The names of the functions that made these closures, and the closures inside them; for the text of an error."""
    names, seen, waiting = set(), set(), list(functions)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, types.MethodType):
            waiting.append(found.__func__)
            waiting.extend(vars(found.__self__).values() if hasattr(found.__self__, "__dict__") else ())
        elif isinstance(found, types.FunctionType):
            names.add(found.__qualname__.split(".")[0])
            for cell in found.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:  # the cell is empty
                    continue
        elif isinstance(found, tuple | list):
            waiting.extend(found)
        elif isinstance(found, dict):
            waiting.extend(found.values())
        elif hasattr(found, "__wrapped__") or hasattr(found, "func"):
            waiting.append(getattr(found, "__wrapped__", None) or found.func)
    return names


# --- two layers as one tree


def _inside(layers: Sequence[PyTree]) -> PyTree:
    """Each leaf becomes a tuple over the layers: masks and labels with the structure of one layer still fit."""
    return jax.tree.map(lambda *leaves: leaves, *layers)


def _beside(layers: Sequence[PyTree]) -> PyTree:
    """A tuple of layers: functions that look at the names of the leaves still find them last in the path."""
    return tuple(layers)


def _labelled(layer: PyTree, join: Callable[..., PyTree]) -> PyTree:
    """The joined layers with each leaf's layer in its place."""
    return join([jax.tree.map(lambda _, index=index: index, layer) for index in range(_LAYERS)])


def _joining(tx: optax.GradientTransformation, layer: PyTree, extra_args: dict[str, Any]) -> Callable[..., PyTree]:
    """The first way of joining layers that tx can work on."""
    for join in (_inside, _beside):
        try:
            jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, **extra_args), join([layer] * _LAYERS))
        except _MISFITS:
            continue
        return join
    raise RefusedError(
        "tx works on one layer, but not on two of them in one tree, so that it cannot be told whether it can be applied layer "
        f"by layer. {_MASKS}"
    )


def _check_update(tx: optax.GradientTransformation, layer: PyTree, extra_args: dict[str, Any]) -> None:
    """Raise `InvalidArgumentError` unless an update gives the state back as it was."""
    check_takes(tx, layer)
    before = jax.eval_shape(tx.init, layer)
    try:
        _, after = jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **extra_args), layer, before, layer)
    except PenstockError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(("the gradient, the state and the parameters", *extra_args))
        raise RefusedError(_refusal(tx, f"its update fails when it is given {given} ({_line(error)})")) from error
    shapes = [jax.tree.map(jnp.shape, state) for state in (before, after)]
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError("tx.update returns a state of another structure, or with other shapes, than tx.init made.")


# --- dependencies


def _entangled(
    tx: optax.GradientTransformation, layer: PyTree, join: Callable[..., PyTree], extra_args: dict[str, Any]
) -> bool:
    """Whether anything that comes out of an update, now or later, depends on more than one layer."""
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
    """Whether a few updates of a small layer among others differ by more than rounding from those of it alone."""
    labels = jax.tree.leaves(_labelled(layer, join))

    def small(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(min(length, _LONGEST_AXIS) for length in leaf.shape), leaf.dtype)

    def furthest(layers: list[PyTree], grads: list[PyTree]) -> jax.Array:
        def step(states: Any, gradients: list[PyTree]) -> tuple[Any, Any]:
            updates, together = tx.update(join(gradients), states[0], join(layers), **extra_args)
            update, alone = tx.update(gradients[-1], states[1], layers[-1], **extra_args)
            return jax.tree.map(_like, (together, alone), states), (updates, update)

        _, (updates, update) = lax.scan(step, (tx.init(join(layers)), tx.init(layers[-1])), grads)
        among = [leaf for leaf, layer in zip(jax.tree.leaves(updates), labels, strict=True) if layer == _LAYERS - 1]
        return jnp.max(jnp.stack([_distance(*pair) for pair in zip(among, jax.tree.leaves(update), strict=True)]))

    generator = np.random.default_rng(0)

    def numbers(scale: float, *axes: int) -> PyTree:
        like = jax.tree.map(small, layer)
        return jax.tree.map(lambda leaf: (generator.normal(size=(*axes, *leaf.shape)) * scale).astype(leaf.dtype), like)

    layers = [numbers(1.0) for _ in range(_LAYERS)]
    grads = [numbers(10.0**index, _STEPS) for index in range(_LAYERS)]
    for leaf in jax.tree.leaves(grads):
        leaf[1] = 0.0  # so that what is added to the gradient stands out
    # Compiled first, so that it runs on numbers wherever this is called, inside of a traced function, too.
    distance = jax.jit(furthest).lower(layers, grads).compile()(layers, grads)
    return not np.asarray(distance) <= 1.0  # true of NaN


def _like(new: Any, old: Any) -> Any:
    """A loop's carry keeps its dtypes."""
    return new if jnp.result_type(new) == jnp.result_type(old) else jnp.asarray(new, jnp.result_type(old))


def _distance(together: jax.Array, alone: jax.Array) -> jax.Array:
    """The largest difference relative to the largest number of the same step, in units of half of the dtype's digits."""
    wide = jnp.promote_types(alone.dtype, jnp.float32)
    digits = float(jnp.finfo(alone.dtype).eps) ** 0.5
    a, b = (jnp.reshape(each, (_STEPS, -1)).astype(wide) for each in (together, alone))
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    largest = jnp.maximum(jnp.max(jnp.abs(b), axis=1, keepdims=True, initial=0.0), jnp.finfo(wide).tiny)
    ratio = jnp.abs(a - b) / largest / digits  # in this order: the smallest number times digits is zero
    return jnp.max(jnp.where(same, 0.0, ratio), initial=0.0)
