"""Over eight devices: the sharding of a state, the mean square of a sharded tensor, and the steps other than the walk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.jax_codings import ROWS as ROWS_OF_CODINGS
from tests.support.jax_codings import assert_codes_agree
from tests.support.jax_sharding import DEVICES, LAYOUTS, ROWS, WIDTH, assert_lies_like, rows, spread, three_steps
from tests.support.jax_training import assert_close, assert_equal, float64
from tests.support.jax_walk import STACK, batch, parameters

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.jax_frontend import (
    LayerStack,
    adamw,
    init_train_state,
    lion,
    make_release_step,
    make_train_step,
    make_update,
    muon,
    stable_adamw,
)

MATRICES = {"tall": (2 * DEVICES, DEVICES), "wide": (DEVICES, 2 * DEVICES)}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


@pytest.mark.parametrize(
    ("layout", "options"),
    [("data parallel", {}), ("fsdp", {"max_norm": 0.05}), ("fsdp", {"microbatches": 2, "max_norm": 0.05})],
    ids=["data parallel", "fsdp, clip", "fsdp, clip, micro-batches"],
)
def test_make_train_step_over_devices_equals_one_device(layout: str, options: dict[str, Any]) -> None:
    params, data, tx = parameters("float64", width=WIDTH), batch(ROWS), stable_adamw(1e-2)
    step = make_train_step(STACK, tx, **options)
    state, _ = three_steps(step, init_train_state(tx, spread(params, layout), layered=False), rows(data))
    alone = init_train_state(tx, params, layered=False)
    for _ in range(3):
        alone, _ = step(alone, data)
    assert_close(state, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this jax has no meshes of explicit axes")
@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "max_norm": 0.05}], ids=["plain", "clip, micro-batches"])
def test_a_mesh_of_explicit_axes_equals_one_device(options: dict[str, Any]) -> None:
    """Where the shardings are part of the types. And without outer parameters, whose state still lies on all devices."""
    generator, tx = np.random.default_rng(4), stable_adamw(1e-2)
    data = jnp.asarray(generator.normal(size=(ROWS, WIDTH)))
    params = {"outer": {}, "layers": jnp.asarray(generator.normal(size=(3, WIDTH, WIDTH)))}
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def gathering(p: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ jax.sharding.reshard(p, PartitionSpec()))

    def make(layer: Any) -> LayerStack:
        return LayerStack(lambda outer, data: data, layer, lambda outer, x, data: jnp.mean((x - 1) ** 2))

    alone, plain = init_train_state(tx, params), make_release_step(make(lambda p, x: x + jnp.tanh(x @ p)), tx, **options)
    for _ in range(3):
        alone, _ = plain(alone, data)
    with jax.set_mesh(mesh):
        layers = jax.device_put(params["layers"], NamedSharding(mesh, PartitionSpec(None, "data")))
        state = init_train_state(tx, {"outer": {}, "layers": layers})
        given = jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))
        state, _ = three_steps(make_release_step(make(gathering), tx, **options), state, given)
    assert_close(state, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this jax has no meshes of explicit axes")
@pytest.mark.parametrize("spec", [PartitionSpec("a", "b"), PartitionSpec(None, ("b", "a"))], ids=str)
def test_muon_takes_the_whole_matrix_over_explicit_axes(spec: PartitionSpec) -> None:
    """One with more rows than columns, and one with fewer: jax leaves the sharding of their products to Muon."""
    generator, tx = np.random.default_rng(6), muon(1e-2, ns_dtype="float32")
    params, grads = ({name: jnp.asarray(generator.normal(size=shape)) for name, shape in MATRICES.items()} for _ in range(2))
    alone = make_update(tx)(jax.tree.map(jnp.copy, grads), tx.init(params), jax.tree.map(jnp.copy, params))
    mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        spread = jax.device_put((grads, params), NamedSharding(mesh, spec))
        found = make_update(tx)(spread[0], init_train_state(tx, spread[1]).opt_state, spread[1])
    assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(found[0])} == {spec}


@pytest.mark.parametrize(
    ("kind", "coded"),
    [("Auto", False), ("Auto", True), ("Explicit", False), pytest.param("Explicit", True, marks=pytest.mark.exhaustive)],
)
def test_a_sharded_parameter_is_rounded_stochastically_as_the_whole_one(kind: str, coded: bool) -> None:
    """Every element has the random bits of its index in the whole tensor; the steps of Lion are exact. With a state in 8 bits
    the blocks are whole on each device, and the program of each is the same."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    if kind == "Explicit" and not hasattr(jax, "set_mesh"):
        pytest.skip("this jax has no meshes of explicit axes")
    generator, tx = np.random.default_rng(5), lion(2.0**-10, 0.0, weight_decay=0.0, compensation="stochastic")
    tx, shape = (ROWS_OF_CODINGS["compact"][0], (DEVICES, 128 * DEVICES)) if coded else (tx, (3 * DEVICES, WIDTH))
    params = {"w": jnp.asarray(generator.normal(size=shape), jnp.bfloat16)}
    given = [{"w": jnp.asarray(generator.normal(size=shape), jnp.bfloat16)} for _ in range(2)]
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,))
    found = []
    for spec in (None, PartitionSpec("data"), PartitionSpec(None, "data")):
        with contextlib.nullcontext() if spec is None or kind == "Auto" else jax.set_mesh(mesh):

            def placed(tree: Any, spec: Any = spec) -> Any:
                copied = jax.tree.map(jnp.copy, tree)
                return copied if spec is None else jax.device_put(copied, NamedSharding(mesh, spec))

            state, update = init_train_state(tx, placed(params)), make_update(tx)
            here, opt_state = state.params, state.opt_state
            for gradients in given:
                here, opt_state = update(placed(gradients), opt_state, here)
            matrices = [leaf for leaf in jax.tree.leaves((here, opt_state)) if leaf.ndim == 2]
            assert len(matrices) == (6 if coded else 2)  # the codes and scales of two fields, and a compensation
            assert spec is None or all(leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2) for leaf in matrices)
            found.append(jax.tree.map(np.asarray, (here, opt_state)))
    assert_codes_agree(found[1], found[0])
    assert_codes_agree(found[2], found[0])
    if not coded:
        assert_equal(found[1:], [found[0]] * 2)


def test_a_shard_that_cuts_a_block_is_refused() -> None:
    tx, mesh = adamw(1e-3, nu_dtype="8bit"), jax.make_mesh((DEVICES,), ("data",))
    leaf = jnp.ones((64, 64 * DEVICES), jnp.float32)
    with pytest.raises(
        RefusedError, match=r"params\['w'\] is sharded so that devices have 64 neighbouring.*multiple of the 128"
    ):
        init_train_state(tx, {"w": jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(None, "data")))})
    state = init_train_state(tx, {"w": jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data")))})
    assert state.opt_state.fields["exp_avg_sq"]["w"].scale.sharding.shard_shape((64, 4)) == (8, 4)


def test_the_mean_square_over_devices_is_that_of_the_whole_tensor() -> None:
    params, generator = parameters("float64", width=WIDTH), np.random.default_rng(3)
    grads = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape)), params)
    grads["layers"]["up"] = grads["layers"]["up"].at[:, 0].multiply(1e3)  # all of the spike lies on one device

    def run(tx: Any, layout: str | None) -> Any:
        held = jax.tree.map(jnp.copy, params) if layout is None else spread(params, layout)
        state, update = tx.init(held), make_update(tx)
        for factor in (1.0, 30.0):
            given = jax.tree.map(lambda leaf: leaf * factor, grads)  # noqa: B023
            held, state = update(given if layout is None else spread(given, layout), state, held)
        return held

    stable = stable_adamw(1e-2, b2=0.9)
    expected, unclipped = run(stable, None), run(adamw(1e-2, b2=0.9, eps=1e-6), None)
    assert float(jnp.max(jnp.abs(expected["layers"]["up"] - unclipped["layers"]["up"]))) > 1e-3
    for layout in LAYOUTS:
        assert_close(run(stable, layout), expected, rtol=1e-12, atol=1e-12)


TRANSFORMS = {
    "stable_adamw": stable_adamw(1e-2),
    "chain": optax.chain(optax.zero_nans(), optax.adaptive_grad_clip(0.1), stable_adamw(1e-2)),
    "partition": optax.partition({"a": adamw(1e-2), "b": optax.sgd(1e-2)}, lambda p: jax.tree.map(lambda _: "a", p)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("layered", [True, False])
def test_a_state_is_sharded_as_its_parameters(name: str, layered: bool) -> None:
    params = spread(parameters("float64", width=WIDTH), "fsdp")
    state, up = init_train_state(TRANSFORMS[name], params, layered=layered), params["layers"]["up"]
    assert_lies_like(state.params, params)
    assert {leaf.sharding.device_set == up.sharding.device_set for leaf in jax.tree.leaves(state)} == {True}
    for field in ("exp_avg", "exp_avg_sq"):
        (moment,) = (
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if f"['{field}'][" in (text := jax.tree_util.keystr(path)) and text.endswith("['up']")
        )
        assert_lies_like(moment, up)
        assert moment.addressable_shards[0].data.size * len(moment.devices()) == moment.size
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_donation_over_devices_raises(layout: str) -> None:
    tx, params = stable_adamw(1e-2), spread(parameters("float64", width=WIDTH), layout)
    update, step, state = make_update(tx), make_train_step(STACK, tx), init_train_state(tx, params, layered=False)
    grads, data = jax.tree.map(jnp.copy, params), rows(batch(ROWS))
    tied = {**params, "layers": {**params["layers"], "up": params["layers"]["down"]}}
    with pytest.raises(InvalidArgumentError, match=r"^params.*\['down'\] and params.*\['up'\] are the same memory"):
        update(grads, state.opt_state, tied)
    step(state, data)
    with pytest.raises(InvalidArgumentError, match=r"^state\.params\['layers'\]\['bias'\] was donated to an earlier update"):
        step(state, data)
    with pytest.raises(InvalidArgumentError, match=r"^state\.count was donated to an earlier update"):
        update(grads, state.opt_state, params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((grads, params, data)))
