"""Every step leaves its state sharded as it was, and is compiled once, on meshes of implicit and of explicit axes."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tests.support.jax_sharding import DEVICES, mesh, programs
from tests.support.rows import covering

from penstock.core.errors import RefusedError
from penstock.jax_frontend import (
    LayerStack,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    release_layers,
    stable_adamw,
)
from penstock.jax_frontend.sharding import sharded_like

pytestmark = pytest.mark.skipif(
    not getattr(jax.config, "jax_use_shardy_partitioner", True), reason="GSPMD lets XLA choose, even where it is told to stay"
)
LAYERS, WIDTH, STEPS = 2, 16, 5
TX = stable_adamw(1e-2)

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, PartitionSpec]]] = {
    "data": ((DEVICES, 1), {}),
    "fsdp": (
        (DEVICES, 1),
        {"in": PartitionSpec("data"), "up": PartitionSpec(None, "data"), "down": PartitionSpec(None, None, "data")},
    ),
    "tensor": (
        (1, DEVICES),
        {
            "in": PartitionSpec(None, "model"),
            "up": PartitionSpec(None, None, "model"),
            "down": PartitionSpec(None, "model", None),  # spelled with a None that jax leaves out
        },
    ),
    "2-D": (
        (DEVICES // 2, 2),
        {
            "in": PartitionSpec("data", "model"),
            "up": PartitionSpec(None, "data", "model"),
            "down": PartitionSpec(None, "model", "data"),
        },
    ),
}
"""Sizes of the axes "data" and "model", and the shardings of parameters that are not whole everywhere; biases always are."""

MAKERS: dict[str, Any] = {
    "make_train_step": lambda stack, loop, layer, **options: make_train_step(stack, TX, **options),
    "make_release_step": lambda stack, loop, layer, **options: make_release_step(stack, TX, **options),
    "release_layers": lambda stack, loop, layer: release_layers(loop, layer, TX),
}
CASES: list[Any] = [
    *covering(["make_release_step"], list(LAYOUTS), [False, True], [{"microbatches": 2}]),
    ("make_release_step", "2-D", True, {"save_residuals": True}),
    ("make_release_step", "fsdp", False, {"microbatches": 2, "accumulation": "state"}),
    *[("make_train_step", layout, explicit, {"microbatches": 2}) for layout, explicit in (("fsdp", False), ("2-D", True))],
    *[("release_layers", layout, explicit, {}) for layout, explicit in (("fsdp", False), ("data", True))],
]


class Placed:
    """A model and its parameters on a mesh. Activations are only constrained where explicit axes demand it."""

    def __init__(self, layout: str, explicit: bool) -> None:
        sizes, self.specs = LAYOUTS[layout]
        devices = mesh().devices.reshape(sizes)
        self.mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * 2)
        rows: dict[str, Any] = {"out_sharding": PartitionSpec("data")} if explicit else {}
        hidden: dict[str, Any] = {"out_sharding": PartitionSpec("data", "model")} if explicit else {}

        def layer(params: Any, x: jax.Array) -> jax.Array:
            up = jnp.tanh(jnp.einsum("ij,jk->ik", x, params["up"], **hidden))
            return x + jnp.einsum("ij,jk->ik", up, params["down"], **rows) + params["bias"]

        def embed(outer: Any, batch: jax.Array) -> jax.Array:
            return jnp.einsum("ij,jk->ik", batch, outer["in"], **rows) + outer["offset"]

        def loop(outer: Any, layers: Any, batch: jax.Array) -> jax.Array:
            x, _ = jax.lax.scan(lambda x, index: (layers(index, x), None), embed(outer, batch), layers.indices)
            return jnp.mean((x - 1) ** 2)

        self.layer, self.loop = layer, loop
        self.stack = LayerStack(embed, layer, lambda outer, x, batch: jnp.mean((x - 1) ** 2))
        self.in_mesh = jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext()

    def params(self) -> Any:
        generator = np.random.default_rng(0)
        shapes = {
            "outer": {"in": (WIDTH, WIDTH), "offset": (WIDTH,)},
            "layers": {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH), "bias": (LAYERS, WIDTH)},
        }

        def placed(path: Any, shape: Any) -> jax.Array:
            spec = self.specs.get(path[-1].key, PartitionSpec())
            return jax.device_put(generator.normal(size=shape).astype("float32") / 4, NamedSharding(self.mesh, spec))

        return jax.tree_util.tree_map_with_path(placed, shapes, is_leaf=lambda node: isinstance(node, tuple))

    def batch(self) -> jax.Array:
        rows = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype("float32")
        return jax.device_put(rows, NamedSharding(self.mesh, PartitionSpec("data")))


@pytest.mark.parametrize(("kind", "layout", "explicit", "options"), CASES)
def test_a_state_stays_where_it_was(kind: str, layout: str, explicit: bool, options: dict[str, Any]) -> None:
    if kind == "release_layers" and not hasattr(jax, "new_ref"):
        pytest.skip("this jax has no jax.new_ref")
    model = Placed(layout, explicit)
    with model.in_mesh:
        step, batch = MAKERS[kind](model.stack, model.loop, model.layer, **options), model.batch()
        state = init_train_state(TX, model.params(), layered=kind != "make_train_step")
        before, compiled = jax.tree.map(lambda leaf: leaf.sharding, state), 0
        for index in range(STEPS):
            state, _ = step(state, batch)
            compiled = compiled if index else programs()
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
    assert (programs(), step.jitted._cache_size()) == (compiled, 1)


def test_an_update_leaves_state_and_parameters_where_they_were() -> None:
    """With gradients that are sharded where the parameters are whole, as XLA may return them."""
    model = Placed("fsdp", False)
    params = model.params()
    state, update = init_train_state(TX, params, layered=False), make_update(TX)
    last = jax.tree.map(lambda leaf: NamedSharding(model.mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "data")), params)
    grads = jax.device_put(model.params(), last)
    before = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    new = update(grads, state.opt_state, state.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, new) == before


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no jax.new_ref")
def test_references_to_explicitly_sharded_layers_are_refused() -> None:
    model = Placed("tensor", True)
    with model.in_mesh, pytest.raises(RefusedError, match=r"explicit mesh axes.*make_release_step"):
        release_layers(model.loop, model.layer, TX)(init_train_state(TX, model.params()), model.batch())


def test_an_explicitly_sharded_layer_axis_is_refused() -> None:
    model = Placed("2-D", True)
    layers = jax.device_put(jnp.ones((LAYERS, 4, 4)), NamedSharding(model.mesh, PartitionSpec("model")))
    with (
        model.in_mesh,
        pytest.raises(RefusedError, match=r"^params\['layers'\]\['up'\] is sharded along the layer axis.*another axis, or"),
    ):
        init_train_state(TX, {"outer": {}, "layers": {"up": layers}})


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1)])
def test_a_constrained_array_is_itself_under_vmap_and_grad(axes: Any) -> None:
    new = jnp.asarray(np.random.default_rng(2).normal(size=(3, 3)), "float32")
    mapped = jax.vmap(lambda n, o: sharded_like(n, o) * 1, axes)
    expected = jnp.stack([new] * 3) if axes[0] is None else new
    assert jnp.array_equal(mapped(new, new + 1), expected)
    grads = jax.jit(jax.grad(lambda n, o: jnp.sum(sharded_like(n, o) ** 2), (0, 1)))(new, new + 1)
    assert jnp.array_equal(grads[0], 2 * new)
    assert not grads[1].any()
