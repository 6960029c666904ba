"""Export of and import into states of optax.adamw and optax.adam, whose moments are biased."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tests.support.jax_training import float64, tree

from penstock.core.errors import InvalidArgumentError
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
RATES = np.linspace(3e-3, 1e-3, 101)
SETTINGS: dict[str, Any] = {"learning_rate": lambda count: jnp.asarray(RATES)[count], "b1": 0.8, "b2": 0.99, "eps": 1e-7}
"""With a table of rates: a schedule that is computed may be rounded differently in each program."""

PAIRS = {
    "adamw": (optax.adamw(**SETTINGS, weight_decay=0.1), adamw(**SETTINGS, weight_decay=0.1)),
    "adam": (optax.adam(**SETTINGS), adam(**SETTINGS)),
    "L2": (optax.chain(optax.add_decayed_weights(0.1), optax.adam(**SETTINGS)), adam(**SETTINGS, weight_decay=0.1)),
}

RULES = {"adamw": "adamw", "adam": "adam", "L2": "adam"}
ADAMW: Any = {"rule": "adamw", "betas": BETAS}


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
def test_training_continues_from_optax_and_to_optax(path: Path, name: str) -> None:
    """50 steps of one and 50 of the other are 100 of Optax's, in float64 to 1e-12; the schedule goes on, too."""
    theirs, ours = PAIRS[name]
    with float64():
        start = tree(0, "float64")
        through = proceeded(theirs, init_train_state(theirs, start), range(100))
        for first, second in ((theirs, ours), (ours, theirs)):
            state = proceeded(first, init_train_state(first, start), range(50))
            declared: Any = {"rule": RULES[name], "betas": BETAS}
            export_state(path, first, state, parameters=True, **(declared if first is theirs else {}))
            fresh = proceeded(second, init_train_state(second, tree(9, "float64")), range(5))
            found = import_state(path, second, fresh, parameters=True, **(declared if second is theirs else {}))
            assert describe(path).groups[0].rule == RULES[name]
            assert_close(proceeded(second, found, range(50, 100)).params, through.params, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_moment_is_rounded_once(path: Path, dtype: str) -> None:
    """There and back: each way half a spacing, which of float16's subnormals is an absolute one."""
    tx = optax.adamw(1e-2, *BETAS)
    state = proceeded(tx, init_train_state(tx, tree(0, dtype)), range(4), dtype)
    export_state(path, tx, state, **ADAMW)
    moments = load(path).parameters["matrix"]
    found = import_state(path, tx, state, **ADAMW).opt_state[0]
    info = jnp.finfo(dtype)
    roundoff, smallest = float(info.eps) / 2, float(info.smallest_subnormal)
    for field, beta, there, back in (
        ("exp_avg", BETAS[0], state.opt_state[0].mu, found.mu),
        ("exp_avg_sq", BETAS[1], state.opt_state[0].nu, found.nu),
    ):
        raw = np.asarray(there["matrix"], np.float64)
        exact = raw / (1 - beta**4)
        assert (np.abs(moments.fields[field].astype(np.float64) - exact) <= roundoff * np.abs(exact) + smallest).all()
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
def test_wrappers_of_adamw_are_exported_and_imported(path: Path, tx: Any) -> None:
    state = proceeded(tx, init_train_state(tx, tree(0)), range(3), "float32")
    export_state(path, tx, state, **ADAMW)
    assert describe(path).groups[0].rule == "adamw"
    assert describe(path).groups[0].hyperparameters == {"beta1": 0.8, "beta2": 0.99}
    found = import_state(path, tx, init_train_state(tx, tree(0)), **ADAMW)
    for a, b in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        roundoff = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.floating) else 0.0
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1.01 * roundoff)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"betas": BETAS}, r"rule=None is not possible.*give rule='adam' or 'adamw', and betas=\(b1, b2\)"),
        ({"rule": "stable_adamw", "betas": BETAS}, r"rule='stable_adamw' is not possible"),
        ({"rule": "adamw"}, r"betas=None is not possible.*give betas=\(b1, b2\)"),
        ({"rule": "adamw", "betas": 0.9}, r"betas=0.9 must be two numbers"),
        ({"rule": "adamw", "betas": (0.9, 1.0)}, r"beta2 of betas=1.0 is out of range"),
        ({"rule": "adamw", "betas": (0.8, 0.9901)}, r"decays exp_avg_sq of 'empty' by 0.99, and not by 0.9901"),
        ({"rule": "adamw", "betas": (0.9, 0.99)}, r"decays exp_avg of 'empty' by 0.8, and not by 0.9"),
    ],
)
def test_a_declaration_that_is_missing_or_wrong_is_refused(path: Path, declared: Any, said: str) -> None:
    tx = optax.adamw(1e-2, *BETAS)
    state = init_train_state(tx, tree(0))
    with pytest.raises(InvalidArgumentError, match=said):
        export_state(path, tx, state, **declared)
    assert not path.exists()
    export_state(path, tx, state, **ADAMW)
    with pytest.raises(InvalidArgumentError, match=said):
        import_state(path, tx, state, **declared)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "MultiSteps and a chain"])
@pytest.mark.parametrize(
    ("make", "moment"), [(optax.adamax, "exp_avg_sq"), (optax.yogi, "exp_avg_sq"), (contrib.adopt, "exp_avg")]
)
def test_other_moments_in_a_state_of_the_same_type_are_refused(path: Path, make: Any, moment: str, wrapped: bool) -> None:
    """The file would say adam, and Adam would go on from moments that are not its own."""
    tx = make(1e-2, *BETAS)
    if wrapped:
        tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), tx, optax.clip(1.0)), 3)
    with pytest.raises(InvalidArgumentError, match=rf"decays {moment} of 'empty' by .*adamax, yogi, adopt"):
        export_state(path, tx, init_train_state(tx, tree(0)), rule="adam", betas=BETAS)
    assert not path.exists()


@pytest.mark.parametrize("make", [optax.nadamw, optax.radam])
def test_moments_of_adam_continue_as_the_rule_that_is_declared(path: Path, make: Any) -> None:
    """Nadam's and RAdam's moments are Adam's; only the update that they make of them is another one."""
    tx = make(1e-2, *BETAS)
    state = proceeded(tx, init_train_state(tx, tree(0)), range(3), "float32")
    export_state(path, tx, state, rule="adam", betas=BETAS)
    expected = proceeded(optax.adam(1e-2, *BETAS), init_train_state(optax.adam(1e-2, *BETAS), tree(0)), range(3), "float32")
    raw = np.asarray(expected.opt_state[0].nu["matrix"], np.float64) / (1 - BETAS[1] ** 3)
    np.testing.assert_allclose(load(path).parameters["matrix"].fields["exp_avg_sq"], raw, rtol=1e-6)
