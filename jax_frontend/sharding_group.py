"""An operation that shards one array as another, whatever the compiler would prefer: jax's shard_alike, which 0.11 removed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_SHARDED_LIKE = Primitive("sharded_like")
_GROUPS = itertools.count()
"""The numbers of groups, which must differ within a program."""


def sharded_like_array(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new`, which a program that Shardy partitions shards as `old`; GSPMD chooses.

    Args:
        new, old: arrays of one shape; old may be sharded over implicit axes, which its type does not show.
    """
    return _SHARDED_LIKE.bind(new, old)


def _lowered(context: mlir.LoweringRuleContext, new: Any, old: Any) -> list[Any]:
    if getattr(jax.config, "jax_use_shardy_partitioner", True):
        from jax.extend.mlir.dialects import sdy

        group = next(_GROUPS)
        sdy.sharding_group(new, group)
        sdy.sharding_group(old, group)
    return [new]


def _batched(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    (new, old), (axis, other) = operands, axes
    return (sharded_like_array(new, old) if axis == other else new), axis


_SHARDED_LIKE.def_impl(lambda new, old: new)
_SHARDED_LIKE.def_abstract_eval(lambda new, old: new)
mlir.register_lowering(_SHARDED_LIKE, _lowered)
ad.defjvp(_SHARDED_LIKE, lambda tangent, new, old: tangent, None)
batching.primitive_batchers[_SHARDED_LIKE] = _batched
