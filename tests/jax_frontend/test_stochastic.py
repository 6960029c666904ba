"""Stochastically rounded parameters in JAX: the bits of PyTorch and of the specification, however the update is compiled."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.support.jax_training import assert_equal
from tests.support.jax_walk import LAYERS, STACK, batch, own_loop, parameters, reference
from tests.support.jax_walk import layer as one_layer

from penstock.core import random_bits
from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import describe
from penstock.jax_frontend import (
    Layers,
    LayerStack,
    adamw,
    compensated,
    export_state,
    import_state,
    init_train_state,
    lion,
    make_release_step,
    make_update,
    release_layers,
)
from penstock.jax_frontend.one_by_one import LARGE
from penstock.jax_frontend.random_bits import bits_like, words_of
from penstock.torch_frontend import Lion
from penstock.torch_frontend import export_state as export_from_torch

LR = 2.0**-10
TX = lion(LR, 0.0, weight_decay=0.0, compensation="stochastic")
"""Its steps are lr times the gradient's sign: exact, with or without fused multiply-add."""


def tree(dtype: Any = "bfloat16", **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    generator = np.random.default_rng(0)
    return {name: jnp.asarray(generator.normal(size=shape), dtype) for name, shape in shapes.items()}


def gradients(params: dict[str, jax.Array], step: int) -> dict[str, jax.Array]:
    generator = np.random.default_rng(step)
    return {name: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype) for name, leaf in sorted(params.items())}


def trained(params: dict[str, jax.Array], tx: Any = TX, steps: int = 3) -> dict[str, jax.Array]:
    params = jax.tree.map(jnp.copy, params)
    update, state = make_update(tx), tx.init(params)
    for step in range(steps):
        params, state = update(gradients(params, step), state, params)
    return params


def to_torch(array: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(getattr(torch, array.dtype.name))


@pytest.mark.parametrize(
    ("shape", "row", "size"),
    [((), 0, 0), ((0, 3), 0, 0), ((7,), 0, 0), ((5, 3, 4), 0, 0), ((5, 3, 4), 9, 240), ((2, 4), 2**30 + 7, 2**33)],
)
def test_bits_are_the_specifications(shape: tuple[int, ...], row: int, size: int) -> None:
    """Of a whole array, and of rows of one."""
    key, when = random_bits.tensor_key(3, "w"), random_bits.when(9)
    of = functools.partial(bits_like, row=jnp.uint32(row) if size else 0, size=size)
    found = jax.jit(of)(jnp.uint32(key), jnp.asarray(when, jnp.uint32), jnp.zeros(shape, jnp.bfloat16))
    index = row * int(np.prod(shape[1:])) + np.arange(int(np.prod(shape))).reshape(shape)
    assert found.tolist() == random_bits.bits_at(random_bits.place(key, when), index).tolist()


def test_the_index_of_an_element_has_two_words() -> None:
    generator, shape = np.random.default_rng(0), (70_000, 3, 80_000, 11)
    indices = [generator.integers(0, length, 100) for length in shape]
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(4)]
    high, low = words_of([jnp.asarray(index, jnp.uint32) for index in indices], strides)
    whole = np.ravel_multi_index(indices, shape)
    assert len(set(np.asarray(high).tolist())) > 10
    np.testing.assert_array_equal(np.asarray(high, np.int64) * 2**32 + np.asarray(low, np.int64), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jax_rounds_as_pytorch_bit_for_bit(dtype: str) -> None:
    """Also what is large enough to be updated one result after the other, as an array and as pieces."""
    params = tree(dtype, w=(5, 3), scalar=(), empty=(0, 2), large=(3, LARGE // 2))
    named = [(name, torch.nn.Parameter(to_torch(leaf))) for name, leaf in params.items()]
    optimizer = Lion(named, lr=LR, betas=(0.0, 0.99), weight_decay=0.0, compensation="stochastic")
    for step in range(2):
        for name, gradient in gradients(params, step).items():
            dict(named)[name].grad = to_torch(gradient)
        optimizer.step()
    for name, leaf in trained(params, steps=2).items():
        assert torch.equal(to_torch(leaf), dict(named)[name].detach()), name


@pytest.mark.parametrize("compensation", ["stochastic", "split8"])
def test_added_increments_are_the_new_parameters(compensation: str) -> None:
    """While p/2 <= p' <= 2p; here elements are at least 64 steps away from zero."""
    tx = lion(LR / 3, 0.0, weight_decay=0.0, compensation=compensation)
    params = jax.tree.map(lambda leaf: jnp.sign(leaf) + leaf / 2, tree(w=(40, 50)))
    directly, state = trained(params, tx), tx.init(params)
    for step in range(3):
        updates, state = jax.jit(tx.update)(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
    assert_equal(params, directly)


def test_small_steps_are_right_in_the_mean() -> None:
    steps, part = 50, 1 / 64
    params = {"w": jnp.full((4096,), 1.5, jnp.bfloat16)}
    tx = lion(part * 2.0**-7, weight_decay=0.0, compensation="stochastic", seed=4)
    update, state = make_update(tx), tx.init(params)
    for _ in range(steps):
        params, state = update({"w": jnp.ones(4096)}, state, params)
    moved = float(jnp.mean(1.5 - params["w"].astype(jnp.float32))) / (steps * part * 2.0**-7)
    assert abs(moved - 1) < 4 * (1 / (4096 * steps * part)) ** 0.5


def test_a_learning_rate_of_zero_freezes_every_bit_and_float32_is_as_ever() -> None:
    params = tree(w=(30, 30))
    assert_equal(trained(params, adamw(0.0, weight_decay=0.1, compensation="stochastic")), params)
    params = tree("float32", w=(30, 30))
    assert_equal(trained(params), trained(params, lion(LR, 0.0, weight_decay=0.0, compensation="none")))
    assert jax.tree.leaves(TX.init(params).random_keys) == []


def test_seeds_and_leaves_differ() -> None:
    params = {"a": jnp.ones((50, 50), jnp.bfloat16), "b": {"a": jnp.ones((50, 50), jnp.bfloat16)}}
    keys = [TX.init(params), lion(LR, compensation="stochastic", seed=1).init(params)]
    found = [int(key) for state in keys for key in jax.tree.leaves(state.random_keys)]
    assert len(set(found)) == 4
    assert found[0] == random_bits.tensor_key(0, "a")


STEPS = {
    "walk": lambda: make_release_step(STACK, TX),
    "micro-batches": lambda: make_release_step(STACK, TX, microbatches=2, max_norm=10.0),
    "in the caller's loop": lambda: release_layers(own_loop, one_layer, TX),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_layer_of_a_stack_is_rounded_as_a_tensor_of_its_own(step: str) -> None:
    """Like the plain gradient and an update of each layer; Lion's steps depend on the gradients' signs only."""
    state, data = init_train_state(TX, parameters("bfloat16")), batch()
    keys = [int(key) for leaf in jax.tree.leaves(state.opt_state.layers.random_keys) for key in leaf]
    assert len(set(keys)) == len(keys) == 3 * LAYERS
    expected, *_ = reference(STACK, TX)(state, data)
    if step == "in the caller's loop" and not hasattr(jax, "new_ref"):
        pytest.skip("this jax has no references")
    start = jax.tree.map(jnp.copy, state.params)
    found, _ = STEPS[step]()(state, data)
    assert_equal(found.opt_state.layers.random_keys, expected.opt_state.layers.random_keys)
    for new, there, before in zip(*map(jax.tree.leaves, (found.params, expected.params, start)), strict=True):
        different = np.asarray(new != there).mean()  # a gradient near zero may have another sign
        assert different < 0.02
        assert np.asarray(new != before).mean() > 5 * different


def test_in_state_accumulation_rounds_the_step_alone() -> None:
    tx, params, data = adamw(1e-2, compensation="stochastic"), parameters("bfloat16"), batch()
    inside, _ = make_release_step(STACK, tx, accumulation="state")(init_train_state(tx, params), data)
    exact, _ = make_release_step(STACK, tx)(init_train_state(tx, params), data)
    assert_equal(inside, exact)
    several, _ = make_release_step(STACK, tx, microbatches=2, accumulation="state")(init_train_state(tx, params), data)
    assert_equal(several.opt_state.layers.random_keys, exact.opt_state.layers.random_keys)


def test_the_layers_of_several_stacks_have_keys_of_their_own() -> None:
    params = parameters("bfloat16")
    several = {"outer": params["outer"], "layers": {"low": params["layers"], "high": params["layers"]}}
    stack = LayerStack(STACK.embed, {name: Layers(one_layer) for name in ("low", "high")}, STACK.loss)
    state = init_train_state(TX, several, stack=stack)
    found = [state.opt_state.outer.random_keys, *(state.opt_state.layers[name].random_keys for name in stack.layer)]
    keys = [int(key) for leaf in jax.tree.leaves(found) for key in jnp.ravel(leaf)]
    assert len(set(keys)) == len(keys) == 1 + 2 * 3 * LAYERS


def test_hyperparameters_that_change_keep_the_seed() -> None:
    """Who does not ask for it has no hyperparameter more in the state."""
    params = tree(w=(20, 20))
    state = optax.inject_hyperparams(lion, hyperparam_dtype=jnp.float32)(LR).init(params)
    assert "seed" not in state.hyperparams
    injected = optax.inject_hyperparams(lion, static_args=("seed",), hyperparam_dtype=jnp.float32)
    tx = injected(LR, weight_decay=0.0, compensation="stochastic", seed=7)
    assert_equal(trained(params, tx), trained(params, lion(LR, weight_decay=0.0, compensation="stochastic", seed=7)))
    with pytest.raises(InvalidArgumentError, match=r"seed is an array.*static_args=\('seed',\)"):
        optax.inject_hyperparams(lion, hyperparam_dtype=jnp.float32)(LR, compensation="stochastic", seed=7).init(params)


def test_impossible_seeds_and_compensations_are_refused_by_name() -> None:
    for seed in (-1, 2**32, 0.5, True):
        with pytest.raises(InvalidArgumentError, match=r"seed=.* must be an int in \[0, 2\*\*32\)"):
            lion(LR, seed=seed)
    with pytest.raises(InvalidArgumentError, match=r"compensated\(tx, 'stochastic'\) is not possible.*penstock's own"):
        compensated(optax.sgd(1e-2), "stochastic")
    params = tree(w=(3, 4))
    tx = optax.chain(TX, optax.scale(0.5))
    with pytest.raises(RefusedError, match=r"compensated transform must be the last"):
        make_update(tx)(gradients(params, 0), tx.init(params), params)
    state = lion(LR, compensation="none").init(tree(w=(3, 4)))
    with pytest.raises(InvalidArgumentError, match=r"whose compensation is stochastic, and the state has None"):
        TX.update(gradients(tree(w=(3, 4)), 0), state, tree(w=(3, 4)))


def test_a_run_goes_on_in_the_other_framework_bit_for_bit(tmp_path: Path) -> None:
    """The file has the keys, of which PyTorch has made others here than JAX would."""
    params = tree(w=(6, 5), v=(7,))
    model = torch.nn.ParameterDict({name: to_torch(leaf) for name, leaf in params.items()})
    optimizer = Lion(model.parameters(), lr=LR, betas=(0.0, 0.99), weight_decay=0.0, compensation="stochastic", seed=3)

    def torch_steps(first: int) -> None:
        for step in range(first, first + 2):
            for name, gradient in gradients(params, step).items():
                model[name].grad = to_torch(gradient)
            optimizer.step()

    torch_steps(0)
    export_from_torch(tmp_path / "state", optimizer, model, parameters=True)
    state = import_state(tmp_path / "state", TX, init_train_state(TX, params), parameters=True)
    keys = {name: int(key) for name, key in state.opt_state.random_keys.items()}
    assert keys == {name: optimizer.state[parameter]["random_key"] for name, parameter in model.items()}
    torch_steps(2)
    new, opt_state, update = state.params, state.opt_state, make_update(TX)
    for step in (2, 3):
        new, opt_state = update(gradients(params, step), opt_state, new)
    for name, leaf in new.items():
        assert torch.equal(to_torch(leaf), model[name].detach())


def test_a_file_has_a_key_for_each_layer(tmp_path: Path) -> None:
    state = init_train_state(TX, parameters("bfloat16"))
    export_state(tmp_path / "state", TX, state)
    other = init_train_state(lion(LR, compensation="stochastic", seed=1), parameters("bfloat16"))
    assert_equal(import_state(tmp_path / "state", TX, other).opt_state.layers.random_keys, state.opt_state.layers.random_keys)
    found = {name: about.random_keys for name, about in describe(tmp_path / "state").parameters.items()}
    assert found["layers.1.up"] == (int(state.opt_state.layers.random_keys["up"][1]),)
    assert found["outer.embedding"] == (int(state.opt_state.outer.random_keys["embedding"]),)
