"""Random bits for stochastic rounding in JAX: `core.random_bits` of whole arrays, and the keys in optimizer states.

The key of a parameter, 0-d uint32, is its leaf in `RuleState.compensation`. The bits of an array that is sharded are those of
the whole, as indices are computed where the elements are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import random_bits
from ..core.array_ops import Array
from .state import RULE_STATES, PyTree

KEY = jnp.uint32
"""The dtype of a key; no other leaf of a compensation has it."""


def initial_key(seed: int, path: jax.tree_util.KeyPath) -> Array:
    """Return the key of a parameter with this path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return jnp.asarray(random_bits.tensor_key(seed, name), KEY)


def is_key(leaf: Any) -> bool:
    """Whether a leaf of a compensation is a key, or one for each layer."""
    return jnp.result_type(leaf) == KEY


def with_layer_keys(state: PyTree, layers: range) -> PyTree:
    """Return the state of a stack, in which all layers have the same keys, with a key for each.

    Args:
        state: of tx.init under jax.vmap.
        layers: their numbers; those of several stacks differ.
    """
    numbers = jnp.arange(layers.start, layers.stop, dtype=KEY)
    return _with_keys(state, lambda key: random_bits.layer_key(key, numbers))


def with_equal_keys(state: PyTree) -> PyTree:
    """Return a state in which all parameters have the same key: updates then do not depend on paths."""
    return _with_keys(state, jnp.zeros_like)


def _with_keys(state: PyTree, new: Callable[[Array], Array]) -> PyTree:
    def replaced(node: Any) -> Any:
        if not isinstance(node, RULE_STATES):
            return node
        return node._replace(compensation=jax.tree.map(lambda leaf: new(leaf) if is_key(leaf) else leaf, node.compensation))

    return jax.tree.map(replaced, state, is_leaf=lambda node: isinstance(node, RULE_STATES))


def bits_like(key: Array, when: Array, like: Array) -> Array:
    """Return random bits for each element of an array, uint32.

    Args:
        key: of the array, 0-d uint32.
        when: `core.random_bits.when`, 0-d uint32.
        like: of any shape.
    """
    shape = jnp.shape(like)
    indices = [lax.broadcasted_iota(KEY, shape, axis) for axis in range(len(shape))]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    high: Any = 0
    low = jnp.zeros(shape, KEY)
    if math.prod(shape) > 2**32:
        high, low = words_of(indices, strides)
    elif math.prod(shape):
        for index, stride in zip(indices, strides, strict=True):
            low = low + index * np.uint32(stride % 2**32)  # of 2^32 the only index is 0
    found: Array = random_bits.bits(random_bits.stream(key, when, high), low)
    return found


def words_of(indices: list[Array], strides: list[int]) -> tuple[Array, Array]:
    """Return the high and the low word of the sum of index*stride over axes.

    Args:
        indices: uint32, of one shape.
        strides: in elements, of any size.
    """
    high = low = jnp.zeros_like(indices[0])
    for index, stride in zip(indices, strides, strict=True):
        for place in range(4):  # 16 bits of the stride at a time
            part = (stride >> (16 * place)) & 0xFFFF
            if not part:
                continue
            lower, upper = (index & 0xFFFF) * part, (index >> 16) * part  # their sum is lower + 2^16 upper
            for number, shift in ((lower, 16 * place), (upper, 16 * place + 16)):
                if shift >= 32:
                    high = high + (number << (shift - 32) if shift < 64 else 0)
                    continue
                added = low + (number << shift)
                high = high + (number >> (32 - shift) if shift else 0) + (added < low).astype(KEY)
                low = added
    return high, low
