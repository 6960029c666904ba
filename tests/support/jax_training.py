"""What the JAX tests share: the transforms by rule, seeded trees, and float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import penstock.jax_frontend as penstock
from penstock.jax_frontend.direct import apply_directly

TRANSFORMS: dict[str, Any] = {
    "stable_adamw": penstock.stable_adamw,
    "adamw": penstock.adamw,
    "adam": penstock.adam,
    "lion": penstock.lion,
    "sgd": penstock.sgd,
    "radam": penstock.radam,
    "adan": penstock.adan,
    "ranger": penstock.ranger,
    "sgd_momentum": functools.partial(penstock.sgd, momentum=0.9),
}
DTYPES = ("float64", "float32", "bfloat16", "float16")


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """64-bit arrays inside. Newer versions of JAX spell it jax.enable_x64."""
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(True):
            yield
    else:
        from jax.experimental import enable_x64

        with enable_x64(True):
            yield


def tree(seed: int, dtype: Any = "float32", scale: float = 1.0) -> dict[str, Any]:
    """A tree with a matrix, a 0-d, an empty and a None leaf."""
    generator = np.random.default_rng(seed)
    shapes = {"matrix": (5, 3), "scalar": (), "empty": (0, 2)}
    leaves = {name: jnp.asarray(scale * generator.normal(size=shape), dtype) for name, shape in shapes.items()}
    return {**leaves, "none": None}


def gradients(steps: int, dtype: Any = "float32") -> list[dict[str, Any]]:
    """Trees with a thirtyfold spike now and then, for update clipping to have something to clip."""
    return [tree(100 + i, dtype, 30.0 if i % 11 == 10 else 1.0) for i in range(steps)]


def train(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """The plain Optax loop: update, apply_updates."""

    @jax.jit
    def update(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for gradient in grads:
        params, state = update(params, state, gradient)
    return params, state


def train_directly(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """The same through make_update; the caller's arrays stay usable."""
    update = penstock.make_update(tx)
    params, state = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, tx.init(params))
    for gradient in grads:
        params, state = update(jax.tree.map(jnp.copy, gradient), state, params)
    return params, state


@functools.partial(jax.jit, static_argnames=("tx", "direct"))
def scanned_over(tx: Any, params: Any, grads: Any, direct: bool) -> tuple[Any, Any]:
    """One update with each of the gradients, which are stacked, in one compiled loop."""

    def body(carry: Any, gradient: Any) -> tuple[Any, None]:
        params, state = carry
        if direct:
            return apply_directly(tx, gradient, state, params), None
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, tx.init(params)), grads)[0]


def scanned(tx: Any, params: Any, gradient: Any, steps: int, direct: bool) -> tuple[Any, Any]:
    """`steps` updates with one gradient, in one compiled loop."""
    repeated = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (steps, *leaf.shape)), gradient)
    return scanned_over(tx, params, repeated, direct)


def assert_close(actual: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Leaf by leaf; the structures and dtypes agree, too."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(e).dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=rtol, atol=atol)


def assert_equal(actual: Any, expected: Any) -> None:
    """On every bit."""
    assert_close(actual, expected, rtol=0.0)
