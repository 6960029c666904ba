"""Transforms with coded states, and comparisons of states whose numbers were rounded by chance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from penstock.jax_frontend import adamw, lion, make_update, ranger, stable_adamw

SHAPE = (40, 300)
"""Of coded matrices: two blocks in each row, and a short one."""

EIGHT_BITS: dict[str, Any] = {"mu_dtype": "8bit", "nu_dtype": "8bit"}

ROWS: dict[str, tuple[Any, str]] = {
    "compact": (adamw(1e-2, **EIGHT_BITS, compensation="split8"), "bfloat16"),
    "smallest": (adamw(1e-2, **EIGHT_BITS, compensation="stochastic"), "bfloat16"),
    "float32": (stable_adamw(1e-2, **EIGHT_BITS), "float32"),
    "lion": (lion(1e-2, mu_dtype="8bit", compensation="none"), "float16"),
    "ranger": (ranger(1e-2, k=2, **EIGHT_BITS, compensation="stochastic"), "bfloat16"),
    "bfloat16 states": (adamw(1e-2, nu_dtype="bfloat16", compensation="stochastic"), "bfloat16"),
}
"""Transforms, and the dtype of their parameters."""

CODED = tuple(row for row in ROWS if row != "bfloat16 states")
"""With fields in 8 bits."""


def matrices(dtype: str) -> dict[str, jax.Array]:
    """A matrix that is coded, and one that is too small."""
    generator = np.random.default_rng(0)
    return {name: jnp.asarray(generator.normal(size=shape), dtype) for name, shape in (("w", SHAPE), ("small", (3, 4)))}


def gradients(dtype: str, first: int, count: int) -> list[dict[str, jax.Array]]:
    """Gradients of `matrices` over several orders of magnitude, of the updates from a number on."""
    found = []
    for step in range(first, first + count):
        generator = np.random.default_rng(100 + step)
        like = sorted(matrices(dtype).items())
        found.append(
            {n: jnp.asarray(generator.normal(size=p.shape) * generator.lognormal(0, 2, p.shape), dtype) for n, p in like}
        )
    return found


def steps(tx: Any, params: Any, count: int, *, added: bool = False) -> tuple[Any, Any]:
    """Parameters and state after some updates; added: through optax.apply_updates."""
    params, state = jax.tree.map(jnp.copy, params), tx.init(params)
    update = jax.jit(tx.update) if added else make_update(tx)
    for gradient in gradients(params["w"].dtype.name, 0, count):
        if added:
            increments, state = update(gradient, state, params)
            params = optax.apply_updates(params, increments)
        else:
            params, state = update(gradient, state, params)
    return params, state


def assert_codes_agree(actual: Any, expected: Any, rate: float = 2.0**-11, rtol: float = 1e-6) -> None:
    """Leaf by leaf: of numbers in 8 or 16 bits few differ, and codes by one; float32 agrees within rounding.

    What is rounded differs between programs by d, about 2^-22 of a block's largest number (four roundings of float32, which
    fused multiply-add leaves out). A code is then another one in about 127*d of the signed elements and in 64*d of the
    squares, and a number in bfloat16 in 2^16*2^-24: less than 2^-11. The remainder of split8 has a unit of 2^8 roundings: less
    than 2^-7; where a code was another one before, so is all of the remainder.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        if a.dtype.itemsize > 2:
            np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol)
            continue
        remainder = a.dtype == np.int8 and getattr(path[-1], "name", "") != "codes"
        assert np.mean(a != e) <= (2.0**-7 if remainder else rate), jax.tree_util.keystr(path)
        if a.dtype.itemsize == 1 and not remainder:
            assert np.abs(a.astype(np.int32) - e.astype(np.int32)).max() <= 1
