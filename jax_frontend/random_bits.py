"""Random bits for stochastic rounding in JAX: `core.random_bits` of whole arrays, and the keys in optimizer states.

The key of a parameter, 0-d uint32, is its leaf in `RuleState.random_keys`. The bits of an array that is sharded are those of
the whole, as indices are computed where the elements are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import random_bits
from ..core.array_ops import Array
from .state import RULE_STATES, PyTree

KEY = jnp.uint32
"""The dtype of a key."""


class Randomness(NamedTuple):
    """What the random bits of one parameter are made of, in one update."""

    key: Array  # 0-d uint32
    update: Array  # its number, 0-d uint32
    microbatch: Array  # its number within the update, 0-d uint32
    numbers: tuple[int, ...]  # of what is rounded stochastically: 0 for the parameter, n for the nth field of its rule
    row: Any = 0  # the first one, of a part of a parameter: an int, or 0-d uint32
    size: int = 0  # of the whole parameter

    def bits(self, number: int, like: Array) -> Array | None:
        """Return random bits of the parameter (0) or of its nth field; None where it is rounded to nearest.

        Args:
            number: 0 or n.
            like: the parameter, or its rows from `row` on.
        """
        if number not in self.numbers:
            return None
        when = random_bits.when(self.update, number, self.microbatch if number else 0)
        return bits_like(self.key, when, like, row=self.row, size=self.size)


def initial_key(seed: int, path: jax.tree_util.KeyPath) -> Array:
    """Return the key of a parameter with this path."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return jnp.asarray(random_bits.tensor_key(seed, name), KEY)


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
        return node._replace(random_keys=jax.tree.map(new, node.random_keys))

    return jax.tree.map(replaced, state, is_leaf=lambda node: isinstance(node, RULE_STATES))


def bits_like(key: Array, when: Array, like: Array, *, row: Any = 0, size: int = 0) -> Array:
    """Return random bits for each element of an array, uint32.

    Args:
        key: of the array, 0-d uint32.
        when: `core.random_bits.when`, 0-d uint32.
        like: of any shape.
        row: the first one, where it is a part of an array, some of its rows: an int, or 0-d uint32.
        size: number of elements of that array.
    """
    shape = jnp.shape(like)
    indices = [lax.broadcasted_iota(KEY, shape, axis) for axis in range(len(shape))]
    if indices and not (isinstance(row, int) and row == 0):
        indices[0] = indices[0] + row
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    above: Any = 0
    whole = jnp.zeros(shape, KEY)
    if max(size, math.prod(shape)) > 2**32:
        above, whole = words_of(indices, strides)
    elif math.prod(shape):
        for index, stride in zip(indices, strides, strict=True):
            whole = whole + index * np.uint32(stride % 2**32)  # of 2^32 the only index is 0
    found: Array = random_bits.bits_at(random_bits.place(key, when), whole, above << random_bits.LOW_BITS)
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
