"""Eight devices, and parameters laid out over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 8
WIDTH, ROWS = 16, 16  # divisible by the number of devices

LAYOUTS = ("data parallel", "fsdp")

_events: list[str] = []
monitoring.register_event_duration_secs_listener(lambda event, _, **__: _events.append(event))


def mesh() -> Mesh:
    if jax.device_count() < DEVICES:
        pytest.skip(f"XLA_FLAGS is set and gives less than {DEVICES} devices")
    return Mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def spread(params: Any, layout: str) -> Any:
    """Parameters on all devices: whole ones (data parallel), or a part of each array but never of a layer axis (FSDP)."""

    def sharding(path: Any, leaf: jax.Array) -> NamedSharding:
        stacked = int(any(getattr(key, "key", None) == "layers" for key in path))
        axis = next((axis for axis in range(stacked, leaf.ndim) if leaf.shape[axis] % DEVICES == 0), None)
        axes = [None] * leaf.ndim if layout == "data parallel" or axis is None else [None] * axis + ["data"]
        return NamedSharding(mesh(), PartitionSpec(*axes))

    # Copies: a whole array keeps its memory on the device where it is already.
    return jax.device_put(jax.tree.map(jnp.copy, params), jax.tree_util.tree_map_with_path(sharding, params))


def rows(batch: Any) -> Any:
    """A batch with its rows spread over the devices."""
    return jax.device_put(batch, NamedSharding(mesh(), PartitionSpec("data")))


def assert_lies_like(actual: Any, expected: Any) -> None:
    """Leaf by leaf on the same devices in the same parts."""
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(e.sharding, a.ndim), (jax.tree_util.keystr(path), a.sharding, e.sharding)


def programs() -> int:
    """How many have been compiled so far."""
    return sum("backend_compile" in event for event in _events)


def three_steps(step: Any, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """Each donates its state, leaves the next one where it was, and is the same program."""
    lies = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    metrics: dict[str, Any] = {}
    for index in range(3):
        before, compiled = state, programs()
        state, metrics = step(state, data)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert_lies_like(state, lies)
        assert index == 0 or programs() == compiled
    return state, metrics
