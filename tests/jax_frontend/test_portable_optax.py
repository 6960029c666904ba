"""To and from Optax's own state: adamw and adam, whose moments are biased."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax_support import float64, tree

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import describe, load
from penstock.jax_frontend import (
    TrainState,
    adam,
    adamw,
    compensated,
    export_state,
    import_state,
    init_train_state,
    make_update,
)

BETAS = (0.8, 0.99)
SETTINGS: dict[str, Any] = {"learning_rate": optax.linear_schedule(3e-3, 1e-3, 100), "b1": 0.8, "b2": 0.99, "eps": 1e-7}
PAIRS = {
    "adamw": (optax.adamw(**SETTINGS, weight_decay=0.1), adamw(**SETTINGS, weight_decay=0.1)),
    "adam": (optax.adam(**SETTINGS), adam(**SETTINGS)),
    "L2": (optax.chain(optax.add_decayed_weights(0.1), optax.adam(**SETTINGS)), adam(**SETTINGS, weight_decay=0.1)),
}


updater = functools.cache(make_update)
"""One compiled update a transform."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def proceeded(tx: Any, state: TrainState, steps: range, dtype: str = "float64") -> TrainState:
    update = updater(tx)
    params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    for step in steps:
        params, opt_state = update(tree(100 + step, dtype), opt_state, params)
    return TrainState(params, opt_state)


def assert_close(one: Any, other: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= bound * np.linalg.norm(np.asarray(b))


@pytest.mark.parametrize("name", PAIRS)
def test_coming_in_and_leaving(path: Path, name: str) -> None:
    """50 steps of one and 50 of the other are 100 of Optax's, in float64 to 1e-12; the schedule goes on, too."""
    theirs, ours = PAIRS[name]
    with float64():
        start = tree(0, "float64")
        through = proceeded(theirs, init_train_state(theirs, start), range(100))
        for first, second in ((theirs, ours), (ours, theirs)):
            state = proceeded(first, init_train_state(first, start), range(50))
            betas = [BETAS if tx is theirs else None for tx in (first, second)]
            export_state(path, first, state, parameters=True, betas=betas[0])
            fresh = proceeded(second, init_train_state(second, tree(9, "float64")), range(5))
            found = import_state(path, second, fresh, parameters=True, betas=betas[1])
            assert describe(path).rule == ("adamw" if name == "adamw" else "adam")
            assert_close(proceeded(second, found, range(50, 100)).params, through.params, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_moment_is_rounded_once(path: Path, dtype: str) -> None:
    """There and back: each way half a spacing, which of float16's subnormals is an absolute one."""
    tx = optax.adamw(1e-2, *BETAS)
    state = proceeded(tx, init_train_state(tx, tree(0, dtype)), range(4), dtype)
    export_state(path, tx, state, betas=BETAS)
    moments = load(path).parameters["matrix"]
    found = import_state(path, tx, state, betas=BETAS).opt_state[0]
    info = jnp.finfo(dtype)
    roundoff, smallest = float(info.eps) / 2, float(info.smallest_subnormal)
    for field, beta, there, back in (
        ("exp_avg", BETAS[0], state.opt_state[0].mu, found.mu),
        ("exp_avg_sq", BETAS[1], state.opt_state[0].nu, found.nu),
    ):
        raw = np.asarray(there["matrix"], np.float64)
        exact = raw / (1 - beta**4)
        assert (np.abs(getattr(moments, field).astype(np.float64) - exact) <= roundoff * np.abs(exact) + smallest).all()
        again = np.asarray(back["matrix"], np.float64)
        assert (np.abs(again - raw) <= 2.01 * roundoff * np.abs(raw) + 2 * smallest).all()


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(optax.linear_schedule(0.0, 1e-2, 10), *BETAS, mu_dtype="bfloat16"),
        optax.MultiSteps(optax.adamw(1e-2, *BETAS), 3),
        compensated(optax.adamw(1e-2, *BETAS)),
        optax.inject_hyperparams(optax.adamw)(1e-2, *BETAS),
        optax.chain(optax.adamw(1e-2, *BETAS), optax.normalize_by_update_norm()),
        optax.chain(optax.adamw(1e3, *BETAS), optax.clip(1.0)),
    ],
    ids=["mu_dtype", "MultiSteps", "compensated", "inject_hyperparams", "normalised", "clipped"],
)
def test_around_and_beside_adamw(path: Path, tx: Any) -> None:
    """The rule does not depend on the learning rate, which may be zero when asked."""
    state = proceeded(tx, init_train_state(tx, tree(0)), range(3), "float32")
    export_state(path, tx, state, betas=BETAS)
    assert describe(path).rule == "adamw"
    assert describe(path).groups[0].hyperparameters == {"beta1": 0.8, "beta2": 0.99}
    found = import_state(path, tx, init_train_state(tx, tree(0)), betas=BETAS)
    for a, b in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        roundoff = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.floating) else 0.0
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1.01 * roundoff)


def test_the_betas_must_be_given_and_be_right(path: Path) -> None:
    tx = optax.adamw(1e-2, *BETAS)
    state = init_train_state(tx, tree(0))
    for betas, said in (
        (None, r"betas=None is not possible.*give betas=\(b1, b2\)"),
        (0.9, r"betas=0.9 must be two numbers"),
        ((0.9, 1.0), r"beta2 of betas=1.0 is out of range"),
        ((0.8, 0.9901), r"decays exp_avg_sq of 'empty' by 0.99, and not by 0.9901"),
        ((0.9, 0.99), r"decays exp_avg of 'empty' by 0.8, and not by 0.9"),
    ):
        given: Any = betas
        with pytest.raises(InvalidArgumentError, match=said):
            export_state(path, tx, state, betas=given)
        assert not path.exists()


def of_normalised_gradients(learning_rate: Any, b1: float, b2: float) -> optax.GradientTransformation:
    """Decays its moments as Adam does, but the first is a mean of something else than the second."""
    adam = optax.scale_by_adam(b1, b2)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        direction, new = adam.update(updates, state, params)
        mu = jax.tree.map(lambda old, g: b1 * old + (1 - b1) * jnp.sign(g), state.mu, updates)
        return direction, new._replace(mu=mu)

    return optax.chain(optax.GradientTransformation(adam.init, update), optax.scale_by_learning_rate(learning_rate))


LOOK_ALIKES: dict[str, tuple[Any, type[Exception], str]] = {
    "adamax": (optax.adamax, InvalidArgumentError, "decays exp_avg_sq of 'empty' by .*adamax"),
    "yogi": (optax.yogi, InvalidArgumentError, "decays exp_avg_sq"),
    "adopt": (optax.contrib.adopt, InvalidArgumentError, "decays exp_avg "),
    "nadamw": (optax.nadamw, RefusedError, r"depends on the gradient besides .*Nadam.* give optax.adam or optax.adamw"),
    "radam": (optax.radam, RefusedError, r"does not depend on exp_avg_sq.*RAdam.* give optax.adam or optax.adamw"),
    "of normalised gradients": (of_normalised_gradients, RefusedError, "are not the means of one gradient and of its square"),
}
AROUND: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "alone": lambda make: make(1e-2, *BETAS),
    "MultiSteps, a schedule from zero": lambda make: optax.MultiSteps(make(optax.linear_schedule(0.0, 1e-2, 50), *BETAS), 3),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(1e-2, *BETAS), optax.clip(1.0)),
}


@pytest.mark.parametrize(
    ("name", "around"),
    [(name, "alone") for name in LOOK_ALIKES] + list(itertools.product(["nadamw", "radam"], list(AROUND)[1:])),
)
def test_what_only_looks_like_adam_is_refused(path: Path, name: str, around: str) -> None:
    """The type of the state is the same; the file would say adam, or adamw, and other optimizers would go on from it."""
    make, error, said = LOOK_ALIKES[name]
    tx = AROUND[around](make)
    state = init_train_state(tx, tree(0))
    with pytest.raises(error, match=said):
        export_state(path, tx, state, betas=BETAS)
    assert not path.exists()
    declared = AROUND[around](optax.adamw if name == "nadamw" else optax.adam)
    export_state(path, declared, state, betas=BETAS)
    with pytest.raises(error, match=said):
        import_state(path, tx, state, betas=BETAS)
