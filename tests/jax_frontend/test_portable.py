"""Portable state in JAX: an import restores what was exported, for every transform, and refuses what does not fit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, float64
from tests.support.jax_walk import LAYERS, STACK, TX, batch, parameters
from tests.support.portable_states import KINDS

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import describe, load, save
from penstock.core.portable.names import Transposed
from penstock.jax_frontend import (
    LayerStack,
    TrainState,
    adam,
    adamw,
    compensated,
    export_state,
    import_state,
    init_train_state,
    make_release_step,
    make_update,
    muon,
    param_labels_for_muon,
    scale_by_stable_adam,
    stable_adamw,
)

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
SHAPES = {"matrix": (3, 2), "vector": (4,), "scalar": (), "empty": (0, 2)}
HALVES = {"matrix": "first", "vector": "second", "scalar": "first", "empty": "second"}


def tree(seed: int, dtype: Any = "float32") -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "blocks": [{name: jnp.asarray(generator.normal(size=shape), dtype) for name, shape in SHAPES.items()} for _ in range(2)]
    }


def trained(tx: Any, steps: int = 3, dtype: Any = "float32", seed: int = 0) -> TrainState:
    return proceeded(tx, init_train_state(tx, tree(seed, dtype)), steps, dtype)


def proceeded(tx: Any, state: TrainState, steps: int, dtype: Any = "float32", seed: int = 100) -> TrainState:
    """Some more steps; the state that was given stays usable."""
    update = updater(tx)
    params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    for step in range(steps):
        params, opt_state = update(tree(seed + step, dtype), opt_state, params)
    return TrainState(params, opt_state)


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def halves(params: Any) -> Any:
    return {"blocks": [HALVES for _ in params["blocks"]]}


updater = functools.cache(make_update)
"""One compiled update a transform."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


@pytest.mark.parametrize(("dtype", "compensation"), KINDS)
def test_training_continues_bitwise(path: Path, dtype: str, compensation: str) -> None:
    rule = list(TRANSFORMS)[KINDS.index((dtype, compensation)) % len(TRANSFORMS)]
    with float64():
        tx = TRANSFORMS[rule](1e-2, weight_decay=1e-1, compensation=compensation)
        state = trained(tx, dtype=dtype)
        export_state(path, tx, state, parameters=True)
        found = import_state(path, tx, init_train_state(tx, tree(7, dtype)), parameters=True)
        assert_same_bits(found, state)
        assert_same_bits(proceeded(tx, found, 2, dtype), proceeded(tx, state, 2, dtype))
    about = describe(path)
    assert [group.rule for group in about.groups] == [rule]
    assert {entry.step for entry in about.parameters.values()} == {3}
    assert set(about.parameters) == {f"blocks.{i}.{name}" for i in range(2) for name in SHAPES}


WRAPPED = {
    "chain": lambda: optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1.0), adamw(1e-2, mask=halves_that_decay)),
    "schedule": lambda: stable_adamw(SCHEDULE),
    "schedule in the chain": lambda: compensated(
        optax.chain(scale_by_stable_adam(), optax.scale_by_schedule(lambda count: -SCHEDULE(count)))
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(adam, hyperparam_dtype=jnp.float32)(
        SCHEDULE, b1=optax.linear_schedule(0.95, 0.5, 6)
    ),
    "partition": lambda: optax.multi_transform({"first": adamw(1e-2), "second": adamw(SCHEDULE)}, halves),
    "rules": lambda: optax.partition({"muon": muon(SCHEDULE), "adamw": adamw(1e-2)}, param_labels_for_muon),
    "masked": lambda: optax.chain(
        optax.masked(adamw(1e-2), lambda p: jax.tree.map(lambda half: half == "first", halves(p))),
        optax.masked(optax.set_to_zero(), lambda p: jax.tree.map(lambda half: half == "second", halves(p))),
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(stable_adamw(SCHEDULE, compensation="none"), 3),
    "MultiSteps": lambda: optax.MultiSteps(adamw(SCHEDULE, compensation="none"), 3),
}


def halves_that_decay(params: Any) -> Any:
    return jax.tree.map(lambda half: half == "first", halves(params))


@pytest.mark.parametrize("name", WRAPPED)
def test_chains_and_wrappers_continue_bitwise(path: Path, name: str) -> None:
    """Schedules, too: they are at another value after three updates than at the start."""
    tx: Any = WRAPPED[name]()
    state = trained(tx, dtype="bfloat16")
    export_state(path, tx, state, parameters=True)
    start = TrainState(state.params, tx.init(state.params)) if name == "masked" else init_train_state(tx, tree(7, "bfloat16"))
    found = import_state(path, tx, start, parameters=True)
    if name not in ("inject_hyperparams", "MultiSteps"):  # they keep the last values of schedules, and a sum that begins anew
        assert_same_bits(found, state)
    goes_on = proceeded(tx, state, 3, "bfloat16")
    assert_same_bits(proceeded(tx, found, 3, "bfloat16"), goes_on)
    forgotten = proceeded(tx, TrainState(state.params, tx.init(state.params)), 3, "bfloat16")
    assert any(
        np.asarray(a).tobytes() != np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(goes_on.params), jax.tree.leaves(forgotten.params), strict=True)
    )


def test_the_groups_of_a_file_have_the_hyperparameters_of_the_transforms(path: Path) -> None:
    tx = optax.multi_transform(
        {"first": adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 0, p)), "second": adamw(SCHEDULE)}, halves
    )
    export_state(path, tx, trained(tx))
    common = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decouple_lr": False, "max_lr": None, "maximize": False}
    groups = {name: dict(group.hyperparameters) for group in describe(path).groups for name in group.parameters}
    assert groups["blocks.1.matrix"] == {**common, "learning_rate": 1e-2, "weight_decay": 1e-4}
    assert groups["blocks.1.scalar"] == {**common, "learning_rate": 1e-2, "weight_decay": 0.0}
    assert groups["blocks.1.vector"] == {**common, "weight_decay": 1e-4}  # a schedule is not a number
    tx = adamw(jnp.asarray(0.25), decouple_lr=True, weight_decay=1e-5, max_lr=0.5)
    export_state(path, tx, trained(tx))
    (group,) = describe(path).groups
    assert group.hyperparameters == {**common, "learning_rate": 0.25, "weight_decay": 1e-5, "decouple_lr": True, "max_lr": 0.5}


def test_the_walk_continues_bitwise_without_recompiling(path: Path) -> None:
    dtype = "bfloat16"  # and a float32 parameter among them
    step = make_release_step(STACK, TX)
    state = init_train_state(TX, parameters(dtype))
    for _ in range(3):
        state, _ = step(state, batch())
    export_state(path, TX, state, parameters=True)
    shapes = {name: entry.shape for name, entry in describe(path).parameters.items()}
    assert shapes["layers.2.up"] == state.params["layers"]["up"].shape[1:]
    assert len(shapes) == 3 * LAYERS + 2
    fresh = init_train_state(TX, jax.tree.map(jnp.ones_like, parameters(dtype)), loss_scale=None)
    found = import_state(path, TX, fresh, parameters=True)
    assert_same_bits(found, state)
    compiled = step.jitted._cache_size()
    assert_same_bits(step(found, batch())[0], step(state, batch())[0])
    assert step.jitted._cache_size() == compiled
    assert not fresh.params["layers"]["up"].is_deleted()


def test_several_stacks_and_bare_arrays_are_named_by_layer(path: Path) -> None:
    def layer(params: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ params["w"])

    stack = LayerStack(lambda o, b: b, {"down": layer, "up": layer}, lambda o, x, b: jnp.mean(x**2))
    weights = jax.random.normal(jax.random.key(0), (5, 4, 4)) / 2
    params = {"outer": {}, "layers": {"down": {"w": weights[:2]}, "up": {"w": weights[2:]}}}
    step, state = make_release_step(stack, TX), init_train_state(TX, params, stack=stack)
    state, _ = step(state, weights[0])
    names = {"layers.up.w": ["up.0", "up.1", "up.2"]}
    export_state(path, TX, state, parameters=True, names=names)
    assert set(load(path).parameters) == {"layers.down.0.w", "layers.down.1.w", "up.0", "up.1", "up.2"}
    found = import_state(path, TX, init_train_state(TX, params, stack=stack), parameters=True, names=names)
    assert_same_bits(found, state)
    bare = init_train_state(TX, {"outer": {"a": jnp.ones(3)}, "layers": weights})
    export_state(path, TX, bare)
    assert set(load(path).parameters) == {"outer.a", *(f"layers.{i}" for i in range(5))}
    assert_same_bits(import_state(path, TX, bare), bare)
    alone = init_train_state(TX, weights)
    export_state(path, TX, alone)
    assert set(load(path).parameters) == {"params"}


def test_names_are_mapped_and_kernels_transposed_both_ways(path: Path) -> None:
    state = init_train_state(TX, parameters())
    state, _ = make_release_step(STACK, TX)(state, batch())
    depth = parameters()["layers"]["up"].shape[0]
    names = {
        "layers.up": Transposed([f"h.{n}.up.weight" for n in range(depth)]),
        "outer.embedding": "wte.weight",
    }
    export_state(path, TX, state, parameters=True, names=names)
    held = load(path).parameters
    assert {"h.1.up.weight", "wte.weight", "layers.1.down", "outer.scale"} <= set(held)
    assert np.array_equal(
        held["h.1.up.weight"].fields["exp_avg"], np.asarray(state.opt_state.layers.fields["exp_avg"]["up"])[1].T
    )
    fresh = init_train_state(TX, parameters())
    assert_same_bits(import_state(path, TX, fresh, parameters=True, names=names), state)
    unrolled = init_train_state(TX, parameters(), layered=False)
    with pytest.raises(InvalidArgumentError, match=r"lacks 'layers.bias', 'layers.down', 'layers.up'"):
        import_state(path, TX, unrolled, names={"outer.embedding": "wte.weight"})
    stacked = {f"layers.{kind}": [f"layers.{n}.{kind}" for n in range(depth)] for kind in ("bias", "down")} | names
    found = import_state(path, TX, unrolled, parameters=True, names=stacked)
    of_outer, of_layers = state.opt_state
    assert_same_bits(
        found.opt_state.fields["exp_avg"], {"outer": of_outer.fields["exp_avg"], "layers": of_layers.fields["exp_avg"]}
    )
    with pytest.raises(InvalidArgumentError, match=r"'layers.ups', and no parameter is called so; did you mean 'layers.up'"):
        export_state(path, TX, state, names={"layers.ups": "x"})


def test_moments_are_upcast_exactly_and_a_missing_compensation_is_zero(path: Path) -> None:
    low, high = adamw(1e-2, b2=0.9, compensation="none"), adamw(1e-2, b2=0.9, mu_dtype="float32", nu_dtype="float32")
    state = trained(low, dtype="bfloat16")
    export_state(path, low, state)
    found = import_state(path, high, init_train_state(high, state.params)).opt_state
    for moments, old in (
        (found.fields["exp_avg"], state.opt_state.fields["exp_avg"]),
        (found.fields["exp_avg_sq"], state.opt_state.fields["exp_avg_sq"]),
    ):
        assert_same_bits(moments, jax.tree.map(lambda leaf: leaf.astype("float32"), old))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.compensation)} == {"int16"}
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found.compensation))
    export_state(path, high, TrainState(state.params, found))
    with pytest.raises(InvalidArgumentError, match=r"exp_avg of 'blocks.0.empty' is float32.*mu_dtype=float32"):
        import_state(path, low, state)


def test_parameters_are_imported_only_on_request(path: Path) -> None:
    state = trained(TX, dtype="bfloat16")
    export_state(path, TX, state)
    fresh = init_train_state(TX, tree(7, "bfloat16"))
    found = import_state(path, TX, fresh)
    assert_same_bits(found, TrainState(fresh.params, state.opt_state))
    make_update(TX)(tree(1, "bfloat16"), found.opt_state, found.params)  # donated
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(fresh))
    with pytest.raises(InvalidArgumentError, match="parameters=True needs a file that holds the parameters"):
        import_state(path, TX, fresh, parameters=True)


MISFITS: dict[str, tuple[Any, Any, str]] = {
    "rule": (adam(1e-2), adamw(1e-2), r"rule 'adam'.*'adamw'.*penstock convert --rule"),
    "lost digits": (adamw(1e-2), adamw(1e-2, compensation="none"), r"by 'split' .*'none'.*--drop-compensation"),
    "other digits": (adamw(1e-2, compensation="kahan"), adamw(1e-2), r"by 'kahan' .*'split'"),
    "fewer": (
        optax.multi_transform({"first": adamw(1e-2), "second": optax.set_to_zero()}, halves),
        adamw(1e-2),
        r"lacks 'blocks.0.empty', 'blocks.0.vector'",
    ),
    "more": (
        adamw(1e-2),
        optax.multi_transform({"first": adamw(1e-2), "second": optax.set_to_zero()}, halves),
        r"optimizer has not, 'blocks.0.empty', 'blocks.0.vector'",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_that_does_not_fit_is_refused(path: Path, misfit: str) -> None:
    there, here, said = MISFITS[misfit]
    export_state(path, there, init_train_state(there, tree(0, "bfloat16")), parameters=True)
    with pytest.raises(InvalidArgumentError, match=said):
        import_state(path, here, init_train_state(here, tree(1, "bfloat16")), parameters=True)


def test_numbers_of_updates_that_one_count_cannot_hold_are_refused(path: Path) -> None:
    state = trained(TX)
    export_state(path, TX, state)
    content = load(path)
    object.__setattr__(content.parameters["blocks.1.vector"], "step", 5)
    save(path, content)
    with pytest.raises(InvalidArgumentError, match=r"3 updates and 'blocks.1.vector' 5.*optax.partition"):
        import_state(path, TX, state)
    whole: Any = {"first": adamw(1e-2), "second": adamw(1e-3)}

    def by_kind(params: Any) -> Any:
        return jax.tree.map(lambda leaf: "second" if leaf.ndim == 1 else "first", params)

    apart = optax.multi_transform(whole, by_kind)
    later = trained(apart)
    export_state(path, apart, later)
    content = load(path)
    for i in range(2):
        object.__setattr__(content.parameters[f"blocks.{i}.vector"], "step", 5)
    save(path, content)
    found = import_state(path, apart, later)
    counts = {label: int(inner.inner_state.count) for label, inner in found.opt_state.inner_states.items()}
    assert counts == {"first": 3, "second": 5}
    for i in range(2):
        for name in SHAPES:
            object.__setattr__(content.parameters[f"blocks.{i}.{name}"], "step", 2**31)
    save(path, content)
    with pytest.raises(InvalidArgumentError, match=r"counts 2147483648 updates, more than .*int32"):
        import_state(path, apart, later)


def test_a_state_without_a_portable_form_is_refused_by_name(path: Path) -> None:
    def refused(tx: Any, said: str, steps: int = 1, kind: type[Exception] = RefusedError) -> None:
        with pytest.raises(kind, match=said):
            export_state(path, tx, trained(tx, steps))
        assert not path.exists()

    refused(optax.chain(adamw(1e-2), optax.ema(0.9)), r"no place for the EmaState at tuple\[1\]")
    refused(optax.lion(1e-2), "ScaleByLionState")
    refused(optax.sgd(1e-2), "no fields of a rule", kind=InvalidArgumentError)
    refused(optax.MultiSteps(adamw(1e-2), 3), r"mini_step of the optimizer state is 2: .*last of the micro-steps", steps=2)
    refused(
        optax.chain(adamw(1e-2, compensation="none"), scale_by_stable_adam()), "two transforms keep exp_avg of 'blocks.0.empty'"
    )
    hidden = optax.with_extra_args_support(optax.GradientTransformation(adamw(1e-2).init, adamw(1e-2).update))
    refused(hidden, "the rule that updates 'blocks.0.empty' is unknown")
    sgd = compensated(optax.multi_transform({"first": adamw(1e-2, compensation="none"), "second": optax.sgd(1e-2)}, halves))
    with pytest.raises(RefusedError, match=r"'blocks.0.vector' is compensated, but no rule updates it"):
        export_state(path, sgd, trained(sgd, dtype="bfloat16"))
    counted = optax.chain(adamw(1e-2), optax.scale_by_schedule(SCHEDULE))
    state = trained(counted)
    shifted = state.opt_state[0], optax.ScaleByScheduleState(state.opt_state[1].count + 4)
    with pytest.raises(
        RefusedError, match=r"tuple\[1\].count of the optimizer state is 7, but 'blocks.0.empty' has had 3 updates"
    ):
        export_state(path, counted, TrainState(state.params, shifted))


def test_layers_that_have_had_different_numbers_of_updates_are_refused(path: Path) -> None:
    state = init_train_state(TX, parameters())
    counts = state.opt_state.layers._replace(count=jnp.arange(LAYERS, dtype=jnp.int32))
    with pytest.raises(RefusedError, match=r"different numbers of updates, 0 to 2.*apply_if_finite"):
        export_state(path, TX, state._replace(opt_state=state.opt_state._replace(layers=counts)))


def test_a_state_of_another_kind_is_refused(path: Path) -> None:
    state = trained(TX)
    with pytest.raises(
        InvalidArgumentError, match=r"state is a RuleState, not a TrainState; .* TrainState\(params, opt_state\) of the two"
    ):
        export_state(path, TX, state.opt_state)
    other: Any = optax.chain(TX, optax.identity())
    with pytest.raises(InvalidArgumentError, match="not one of this transform"):
        export_state(path, other, state)
    with pytest.raises(InvalidArgumentError, match=r"rule and betas are for optax\.adam"):
        export_state(path, TX, state, betas=(0.9, 0.99))
    twice: Any = {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}
    with pytest.raises(InvalidArgumentError, match=r"two parameters are called 'a\.b'"):
        export_state(path, TX, init_train_state(TX, twice))
    with pytest.raises(InvalidArgumentError, match=r"not an array in memory.*inside of jax.jit"):
        jax.jit(lambda state: export_state(path, TX, state))(state)
    proceeded_from = jax.tree.map(jnp.copy, state)
    make_update(TX)(tree(1), proceeded_from.opt_state, proceeded_from.params)
    with pytest.raises(InvalidArgumentError, match=r"state.params.* was donated"):
        export_state(path, TX, proceeded_from)
    with float64():
        wide = trained(TX, dtype="float64")
    with pytest.raises(InvalidArgumentError, match="set jax_enable_x64"):
        export_state(path, TX, wide)
    assert not path.exists()
