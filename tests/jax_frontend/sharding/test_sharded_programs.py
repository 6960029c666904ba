"""The program of the walk over eight devices: one layer is gathered at a time, stacks are never copied, memory is aliased."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.jax_sharding import DEVICES, ROWS, mesh, rows, spread
from tests.support.jax_walk import LENGTH, batch, embed, layer, mean_loss, parameters

from penstock.jax_frontend import LayerStack, init_train_state, make_release_step, stable_adamw

LAYERS, WIDTH = 32, 128
MOVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "copy")
FLOAT = 4  # bytes


def moved(program: str) -> list[tuple[str, tuple[int, ...]]]:
    """(operation, shape) of everything that is copied, or sent between devices."""
    found = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* ({'|'.join(MOVES)})(?:-start)?\(", program)
    return [(operation, tuple(int(length) for length in shape.split(",") if length)) for shape, operation in found]


def program(**options: Any) -> tuple[Any, Any]:
    """The state, and the compiled step of a model whose activations keep their rows on their devices."""

    def kept(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), PartitionSpec("data")))

    stack = LayerStack(lambda outer, data: kept(embed(outer, data)), lambda p, x: kept(layer(p, kept(x))), mean_loss)
    tx = stable_adamw(1e-3)
    state = init_train_state(tx, spread(parameters(layers=LAYERS, width=WIDTH), "fsdp"))
    return state, make_release_step(stack, tx, **options).lower(state, rows(batch(ROWS))).compile()


def local_bytes(tree: Any) -> int:
    """On one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"microbatches": 2}], ids=["plain", "clip", "micro-batches"])
def test_no_stack_is_gathered_or_copied(options: dict[str, Any]) -> None:
    state, compiled = program(**options)
    stacks = {(LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH // DEVICES, WIDTH)}
    assert {leaf.shape for leaf in jax.tree.leaves(state)} & stacks
    moves = moved(compiled.as_text())
    assert ("all-gather", (WIDTH, WIDTH)) in moves
    assert [move for move in moves if move[1] in stacks] == []
    assert max(math.prod(shape) for operation, shape in moves if operation == "all-gather") <= WIDTH * WIDTH

    analysis: Any = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == local_bytes(state)
    layer_bytes = 2 * WIDTH * WIDTH * FLOAT  # of one layer's gathered weights, of its gradient, of a sum of gradients
    activations = LAYERS * ROWS // DEVICES * LENGTH * WIDTH * FLOAT
    gradients = local_bytes(state.params)
    assert analysis.temp_size_in_bytes <= activations + 3 * layer_bytes < activations + gradients


def test_without_a_fence_stacks_are_copied() -> None:
    _, compiled = program(fence="none")
    assert ("copy", (LAYERS, WIDTH // DEVICES, WIDTH)) in moved(compiled.as_text())
