"""Fields in 8 bits and in stochastic bfloat16, and split8, in JAX: the numbers of the specification, however it is compiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.support.jax_codings import CODED, EIGHT_BITS, ROWS, SHAPE, assert_codes_agree, gradients, matrices, steps
from tests.support.jax_training import assert_close, assert_equal
from tests.support.jax_walk import STACK, batch, parameters, reference

from penstock.core import random_bits
from penstock.core import update as specification
from penstock.core.array_ops import numpy_ops
from penstock.core.codings import EightBit, load
from penstock.core.compensation import WITH_RANDOM_BITS, resolve
from penstock.core.errors import InvalidArgumentError, RefusedError
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
    one_by_one,
    scale_by_stable_adam,
    stable_adamw,
)
from penstock.jax_frontend.array_ops import jax_ops
from penstock.jax_frontend.rule_transform import transformation
from penstock.jax_frontend.state import Stochastic
from penstock.torch_frontend import AdamW
from penstock.torch_frontend import export_state as export_from_torch


def on_numpy(tx: Any, params: Any, state: Any, name: str, given: list[Any]) -> tuple[Any, ...]:
    """The parameter, the fields and the compensation after one update of a leaf with these micro-batches, by `core`."""
    rule, current, step = tx.rule, tx.arguments.hyperparameters(0), int(state.count) + 1
    corrections = jax.tree.map(np.float32, rule.corrections(current, jnp.float32(step), jnp))
    p, fields, kept, key = jax.tree.map(np.asarray, leaf_of(params, state, name))
    compensation = resolve(tx.arguments.compensation, p.dtype.name)
    by_chance = {0} if compensation in WITH_RANDOM_BITS else set()
    for number, (field, stored) in enumerate(zip(rule.fields, fields, strict=True), 1):
        if field.of_squares and (isinstance(stored, EightBit) or stored.dtype == "bfloat16"):
            by_chance.add(number)
    of_leaf = specification.TensorState(tuple(fields), kept)
    for k, gradient in enumerate(given):

        def bits(number: int, k: int = k, p: Any = p) -> Any:
            if number not in by_chance:
                return None
            place = random_bits.place(int(key), random_bits.when(step, number, k if number else 0))
            return random_bits.bits_at(place, np.arange(p.size).reshape(p.shape))

        arguments = numpy_ops, rule, current, corrections, compensation, p, np.asarray(gradient), of_leaf
        if gradient is given[-1]:
            p, of_leaf = specification.update(*arguments, first=k == 0, bits=bits)
        else:
            of_leaf = specification.accumulate(*arguments, first=k == 0, bits=bits)
    return p, list(of_leaf.fields), of_leaf.compensation


def leaf_of(params: Any, state: Any, name: str) -> tuple[Any, ...]:
    """The parameter, its fields, its compensation and its key."""
    kept, keys = state.compensation[name], state.random_keys
    kept = None if isinstance(kept, Stochastic) else kept
    return params[name], [field[name] for field in state.fields.values()], kept, keys and keys[name]


EACH = [pytest.param(row, marks=() if row in ("compact", "float32") else pytest.mark.exhaustive) for row in ROWS]


@pytest.mark.parametrize("row", ROWS)
def test_an_update_is_that_of_the_specification_on_numpy(row: str) -> None:
    """The third one. The same random bits, and one rounding of float32 apart, by fused multiply-add."""
    tx, dtype = ROWS[row]
    params, state = steps(tx, matrices(dtype), 2)
    (given,) = gradients(dtype, 2, 1)
    expected = {name: on_numpy(tx, params, state, name, [given[name]]) for name in params}
    new = make_update(tx)(given, state, params)
    for name, numbers in expected.items():
        assert_codes_agree(leaf_of(*new, name)[:3], numbers)


@pytest.fixture
def in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are updated some rows after the other, the last ones fewer, as on a user's only CPU."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(one_by_one, "PIECE", 7 * SHAPE[1])


@pytest.mark.parametrize("row", EACH)
@pytest.mark.parametrize("added", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["written", "added"])
def test_rows_after_each_other_equal_all_at_once(row: str, added: bool, in_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """StableAdamW's mean square is summed in another order."""
    tx, dtype = ROWS[row]
    by_rows = steps(tx, matrices(dtype), 2, added=added)
    monkeypatch.setattr(one_by_one, "PIECE", 2**20)
    assert_codes_agree(by_rows, steps(tx, matrices(dtype), 2, added=added))


@pytest.mark.parametrize("row", [row for row in EACH if row.values[0] in CODED])
def test_temporaries_are_those_of_some_rows(row: str, in_rows: None) -> None:
    """Of one matrix, however many there are: the bits as integers of what is in low precision, it or its state. Of the rows: 8
    numbers in float32. (All at once: 13 to 19 bytes of each element of the matrices.)"""
    tx, dtype = ROWS[row]
    params = {name: jnp.zeros((256, SHAPE[1]), dtype) for name in "abc"}
    state = tx.init(params)
    analysis = make_update(tx).lower(params, state, params).compile().memory_analysis()
    of_one = [params["a"], *(field["a"] for field in state.fields.values() if not isinstance(field["a"], EightBit))]
    bits = sum(x.nbytes for x in of_one if x.dtype.itemsize == 2)
    assert analysis.temp_size_in_bytes <= bits + 8 * 4 * one_by_one.PIECE + 4096
    assert analysis.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves((state, params)))


@pytest.mark.parametrize("compensation", ["split8", "stochastic"])
def test_a_learning_rate_of_zero_freezes_every_bit(compensation: str) -> None:
    tx = adamw(1e-2, **EIGHT_BITS, compensation=compensation)
    params, state = steps(tx, matrices("bfloat16"), 2)
    kept = jax.tree.map(np.asarray, (params, state.compensation))
    frozen = adamw(0.0, weight_decay=0.1, **EIGHT_BITS, compensation=compensation)
    params, new = make_update(frozen)(gradients("bfloat16", 5, 1)[0], state, params)
    assert_equal(jax.tree.map(np.asarray, (params, new.compensation)), kept)


def test_who_does_not_ask_for_it_has_no_leaf_more() -> None:
    params = matrices("bfloat16")
    for tx, leaves in ((adamw(1e-3), 1 + 3 * len(params)), (lion(1e-3, compensation="none"), 1 + len(params))):
        state = tx.init(params)
        assert state.random_keys is None
        assert len(jax.tree.leaves(state)) == leaves
    assert set(lion(1e-3, mu_dtype="8bit").init(params).random_keys or ()) == set()  # rounded to nearest


def test_the_state_says_which_leaves_are_coded() -> None:
    """Of a stack, one layer decides: its norms are vectors. To a transform by itself each leaf is one tensor."""
    stacked = {"norm": jnp.ones((32, 200)), "w": jnp.ones((3, 32, 128)), "narrow": jnp.ones((3, 64, 100))}
    params = {"outer": {"bias": jnp.ones(5000), "kernel": jnp.ones((64, 3, 3, 32)), "small": jnp.ones((8, 128))}, "layers": {}}
    tx = adamw(1e-3, **EIGHT_BITS)

    def coded(state: Any) -> set[str]:
        return {name for name, field in state.fields["exp_avg_sq"].items() if isinstance(field, EightBit)}

    for name, leaf in stacked.items():
        params["layers"] = {name: leaf}
        state = init_train_state(tx, params)
        assert coded(state.opt_state.layers) == {"w"} & {name}
        assert coded(state.opt_state.outer) == {"kernel"}
    assert coded(tx.init(stacked)) == {"norm", "w", "narrow"}
    assert tx.init(params["outer"]).fields["exp_avg"]["kernel"].scale.shape == (64, 3)


# --- the walk

WIDE = 128


@pytest.mark.parametrize(
    ("loss_scale", "options"),
    [
        (8.0, {"microbatches": 2, "max_norm": 0.05}),
        pytest.param(None, {"accumulation": "state"}, marks=pytest.mark.exhaustive),
        pytest.param(None, {"save_residuals": True}, marks=pytest.mark.exhaustive),
    ],
    ids=["loss scale, micro-batches, clip", "in state", "saved residuals"],
)
def test_the_walk_equals_the_plain_gradient_and_an_update_of_each_layer(loss_scale: Any, options: dict[str, Any]) -> None:
    """Gradients differ by the order of sums, up to 2^-18 of the largest; so do codes, about one in 2^18/127 of them."""
    tx, data = adamw(1e-2, **EIGHT_BITS), batch()
    params = parameters("float32", width=WIDE)
    expected, *_ = reference(STACK, tx, options.get("max_norm"))(init_train_state(tx, params), data)
    step, state = make_release_step(STACK, tx, **options), init_train_state(tx, params, loss_scale=loss_scale)
    found, metrics = step(state, data)
    assert isinstance(found.opt_state.layers.fields["exp_avg"]["up"], EightBit)
    assert_codes_agree(found.opt_state, expected.opt_state, rate=2.0**-8, rtol=1e-4)
    if loss_scale is not None:  # a step that overflows changes nothing
        before = jax.tree.map(np.asarray, found.opt_state)
        scale = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), found.loss_scale)
        found, metrics = step(found._replace(loss_scale=scale), data)
        assert metrics["skipped"]
        assert_equal(jax.tree.map(np.asarray, found.opt_state), before)


@pytest.mark.parametrize(
    ("row", "cut"),
    [
        ("compact", False),
        ("float32", True),
        *(
            pytest.param(row, cut, marks=pytest.mark.exhaustive)
            for row in ("smallest", "bfloat16 states")
            for cut in (False, True)
        ),
    ],
)
def test_micro_batches_into_the_state_have_random_bits_of_their_own(
    row: str, cut: bool, request: pytest.FixtureRequest
) -> None:
    """Four of them, of which the scan has two, and in every layer, against the specification on numpy; the gradients of a layer
    and of the outer matrix are the numbers of the micro-batch. Cut: some rows after the other."""
    if cut:
        request.getfixturevalue("in_rows")
    tx, dtype = ROWS[row]
    generator = np.random.default_rng(0)
    numbers = jnp.asarray(generator.normal(size=(4, *SHAPE)) * generator.lognormal(0, 2, SHAPE), dtype)

    def added(params: Any, x: jax.Array, numbers: jax.Array) -> jax.Array:
        return x + jnp.sum(params["w"].astype(jnp.float32) * numbers[0])

    def embed(outer: Any, batch: Any) -> jax.Array:
        return added(outer, jnp.zeros(()), batch)

    layers = Layers(added, context=lambda outer, x, batch: batch)
    stack = LayerStack(embed, layers, lambda outer, x, batch: x)
    w = matrices(dtype)["w"]
    params = {"outer": {"w": w}, "layers": {"w": jnp.stack([w, 2 * w])}}
    state = init_train_state(tx, params)
    step = make_release_step(stack, tx, microbatches=4, accumulation="state")
    state, _ = step(state, numbers)  # in the first update c1 is nearly 1, and many sums lie halfway between two numbers
    start = jax.tree.map(jnp.copy, state)
    found, _ = step(state, numbers)
    parts = [(start.params["outer"], start.opt_state.outer, found.params["outer"], found.opt_state.outer)]
    of_layers = start.params["layers"], start.opt_state.layers, found.params["layers"], found.opt_state.layers
    parts += [jax.tree.map(lambda leaf, index=index: leaf[index], of_layers) for index in range(2)]
    for params, state, new_params, new_state in parts:
        expected = on_numpy(tx, params, state, "w", [numbers[k] / 4 for k in range(4)])
        assert_codes_agree(leaf_of(new_params, new_state, "w")[:3], expected)


def test_a_walk_with_coded_states_takes_less_memory() -> None:
    """At its peak less than parameters and state without codes."""

    def state_of(tx: Any) -> tuple[Any, int]:
        state = jax.eval_shape(lambda: init_train_state(tx, parameters("bfloat16", 8, WIDE)))
        return state, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    tx = ROWS["compact"][0]
    state, size = state_of(tx)
    analysis = make_release_step(STACK, tx, fence="conditional").lower(state, batch(1)).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == size
    assert analysis.argument_size_in_bytes + analysis.temp_size_in_bytes < state_of(adamw(1e-2))[1]


# --- checkpoints and wrappers


def test_a_run_that_resumes_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    checkpoints = pytest.importorskip("orbax.checkpoint")
    serialization = pytest.importorskip("flax.serialization")
    tx, data = ROWS["compact"][0], batch()
    step, params = make_release_step(STACK, tx), parameters("bfloat16", width=WIDE)
    state, _ = step(init_train_state(tx, params), data)
    with checkpoints.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "1", jax.eval_shape(lambda: init_train_state(tx, params)))
    given = serialization.from_bytes(init_train_state(tx, params), serialization.to_bytes(state))
    assert_equal(given, restored)
    expected, _ = step(state, data)
    resumed, _ = step(restored, data)
    assert_equal(resumed, expected)


@pytest.mark.parametrize("row", ["compact", pytest.param("bfloat16 states", marks=pytest.mark.exhaustive)])
def test_a_portable_file_has_codes_scales_and_keys_bit_for_bit(row: str, tmp_path: Path) -> None:
    """Layer by layer; into another seed's state, and codes as numbers into a state without them."""
    tx, _ = ROWS[row]
    params = parameters("bfloat16", width=WIDE)
    state = init_train_state(tx, params)
    layers = state.opt_state.layers
    codes = jax.tree.map(lambda leaf: jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype) % 64, layers.fields)
    state = state._replace(opt_state=state.opt_state._replace(layers=layers._replace(fields=codes)))
    export_state(tmp_path / "state", tx, state, parameters=True)
    own = dataclasses.replace(tx.arguments, seed=5)
    other = init_train_state(transformation(own), params)
    found = import_state(tmp_path / "state", tx, other, parameters=True)
    assert_equal(found, state)
    options = {"compensation": tx.arguments.compensation, "mu_dtype": "float32", "nu_dtype": "float32"}
    decoded = import_state(tmp_path / "state", adamw(1e-2, **options), init_train_state(adamw(1e-2, **options), params))
    for name, tree in decoded.opt_state.layers.fields.items():
        for layer in range(3):
            of_layer = jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf[layer]), codes[name]["up"])
            assert_equal(tree["up"][layer], load(numpy_ops, of_layer, "float32"))


def test_a_run_in_pytorch_goes_on_here_with_its_bits(tmp_path: Path) -> None:
    """The same codes, scales and keys from the file, and one more update of both within a code."""
    start = {name: torch.from_numpy(np.array(leaf)) for name, leaf in matrices("float32").items()}
    model = torch.nn.ParameterDict({name: leaf.to(torch.bfloat16) for name, leaf in start.items()})
    settings = {"lr": 1e-2, "weight_decay": 1e-4, "compensation": "split8", "seed": 3}
    optimizer = AdamW(model.named_parameters(), state_dtype="8bit", **settings)

    def torch_step(step: int) -> None:
        for name, gradient in gradients("bfloat16", step, 1)[0].items():
            model[name].grad = torch.from_numpy(np.array(gradient, np.float32)).to(torch.bfloat16)
        optimizer.step()

    tx, params, update = ROWS["compact"][0], None, make_update(ROWS["compact"][0])
    for step in range(2):
        torch_step(step)
        export_from_torch(tmp_path / f"{step}", optimizer, model, parameters=True)
    fresh = init_train_state(tx, matrices("bfloat16"))
    found = [import_state(tmp_path / f"{step}", tx, fresh, parameters=True) for step in range(2)]
    assert int(found[0].opt_state.random_keys["w"]) == optimizer.state[model["w"]]["random_key"]
    (given,) = gradients("bfloat16", 1, 1)
    params, state = update(given, found[0].opt_state, found[0].params)
    assert_codes_agree((params, state), (found[1].params, found[1].opt_state))


def test_wrappers_of_optax_give_the_numbers_of_the_transform_alone() -> None:
    """b2 as an array is known to a rounding of float32 only, and so is 1-b2 to 2^-14; all else is the same program.

    Wrappers add increments, of which XLA may round the first term or not: a parameter may be its neighbour in float32.
    """
    own, options = adamw(1e-2, **EIGHT_BITS), {"static_args": ("seed",), "hyperparam_dtype": jnp.float32}
    wrappers = {
        "alone": own,
        "partition": optax.partition({"a": own}, lambda params: jax.tree.map(lambda _: "a", params)),
        "apply_if_finite": optax.apply_if_finite(own, 3),
        "inject_hyperparams": optax.inject_hyperparams(adamw, **options)(1e-2, **EIGHT_BITS, seed=0),
        "MultiSteps": optax.MultiSteps(own, 1).gradient_transformation(),
    }
    found = {name: steps(tx, matrices("float32"), 2)[0] for name, tx in wrappers.items()}
    for name, params in found.items():
        bound = 1e-2 * (2.0**-12 if name == "inject_hyperparams" else 2.0**-16)
        assert_close(params, found["alone"], rtol=2.0**-23, atol=bound)


def test_a_b2_that_changes_converts_scales() -> None:
    """As without codes, but for the roundings to codes: the second moments' mean is that of float32 within 1%."""
    means = []
    for options in ({}, EIGHT_BITS):
        tx = optax.inject_hyperparams(adamw, hyperparam_dtype=jnp.float32)(1e-2, b2=0.99, **options)
        params, state = steps(tx, matrices("float32"), 2)
        state.hyperparams["b2"] = jnp.float32(0.9)
        _, state = make_update(tx)(gradients("float32", 3, 1)[0], state, params)
        field = state.inner_state.fields["exp_avg_sq"]["w"]
        means.append(float(jnp.mean(load(jax_ops, field, "float32"))))
    assert abs(means[1] / means[0] - 1) < 0.01


def test_trees_like_params_are_mapped_with_eight_bit_fields_as_leaves() -> None:
    """As shardings are made: `optax.tree_map_params` over states."""
    for tx in (adamw(1e-3, **EIGHT_BITS), adamw(1e-3, compensation="split8", b1=jnp.asarray(0.9)), adamw(1e-3)):
        params = matrices("bfloat16")
        names = {name: name for name in params}
        state = optax.tree_map_params(
            tx, lambda _, name: name, tx.init(params), names, is_leaf=lambda node: isinstance(node, EightBit)
        )
        assert state.fields == {"exp_avg": names, "exp_avg_sq": names}
        assert jax.tree.structure(state.random_keys) == jax.tree.structure(tx.init(params).random_keys)


def test_impossible_compensations_and_states_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"compensated\(tx, 'split8'\) is not possible.*penstock's own"):
        compensated(optax.sgd(1e-2), "split8")
    params = matrices("bfloat16")
    for compensation, refused in (("split8", True), ("stochastic", True), ("none", False)):
        tx = optax.chain(adamw(1e-2, **EIGHT_BITS, compensation=compensation), optax.scale(0.5))
        if refused:
            with pytest.raises(RefusedError, match=r"compensated transform must be the last"):
                jax.eval_shape(make_update(tx).jitted, params, tx.init(params), params)
        else:
            jax.eval_shape(make_update(tx).jitted, params, tx.init(params), params)
    state = adamw(1e-2, **EIGHT_BITS).init(params)._replace(random_keys=None)
    with pytest.raises(InvalidArgumentError, match=r"params\['w'\] is rounded stochastically.*no random key"):
        adamw(1e-2, **EIGHT_BITS).update(params, state, params)


def test_the_direction_alone_has_coded_moments() -> None:
    tx = optax.chain(scale_by_stable_adam(mu_dtype="8bit", nu_dtype="8bit"), optax.scale_by_learning_rate(1e-2))
    whole = stable_adamw(1e-2, 0.9, 0.99, 1e-6, weight_decay=0.0, **EIGHT_BITS)
    params = matrices("float32")
    assert_close(steps(tx, params, 2)[0], steps(whole, params, 2)[0], rtol=1e-5, atol=1e-6)
