"""The transforms under JAX's own transformations: vmap, scan, jit, sharding; and what importing the package needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, assert_close, scanned_over, train
from tests.support.rules import ADAM_FAMILY

from penstock.core.array_ops import numpy_ops
from penstock.core.dtypes import state_dtypes
from penstock.core.rules.adam_family import AdamHyperparameters, bias_corrections
from penstock.core.update import init_state, update
from penstock.jax_frontend.array_ops import jax_ops

SOURCES = Path(__file__).resolve().parents[2] / "src"
CASES = pytest.mark.parametrize(("rule", "dtype"), [("stable_adamw", "bfloat16"), *[(rule, "float32") for rule in TRANSFORMS]])


def layers(seed: int, dtype: str, count: int = 4) -> jax.Array:
    """Stacked matrices, each ten times as large as the one before."""
    scale = 10.0 ** np.arange(count)[:, None, None]
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 3, 2)) * scale, dtype)


@CASES
def test_vmap_equals_each_layer_by_itself(rule, dtype) -> None:
    tx = TRANSFORMS[rule](1e-2)
    per_layer = optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
    params, grads = layers(0, dtype), [layers(seed, dtype).at[1].mul(30.0) for seed in (1, 2, 3)]
    stacked, _ = train(per_layer, params, grads)
    for index in range(len(params)):
        alone, _ = train(tx, params[index], [gradient[index] for gradient in grads])
        assert_close(stacked[index], alone, rtol=1e-6 if dtype == "float32" else 2**-7)


@CASES
def test_scan_equals_the_loop(rule, dtype) -> None:
    tx = TRANSFORMS[rule](optax.linear_schedule(1e-2, 0.0, 10))
    params, grads = layers(0, dtype), [layers(seed, dtype) for seed in range(1, 6)]
    looped, looped_state = train(tx, params, grads)
    scanned, scanned_state = scanned_over(tx, params, jnp.stack(grads), False)
    assert_close(scanned, looped, rtol=1e-6 if dtype == "float32" else 2**-7)
    assert scanned_state.count == looped_state.count == 5


def test_the_count_saturates() -> None:
    tx = TRANSFORMS["adamw"](1e-2)
    state = tx.init(jnp.ones(2))._replace(count=jnp.asarray(2**31 - 1, jnp.int32))
    _, state = tx.update(jnp.ones(2), state, jnp.ones(2))
    assert state.count == 2**31 - 1


@pytest.mark.parametrize(
    ("rule", "dtype", "compensation"),
    [("stable_adamw", "bfloat16", "split"), ("adam", "float16", "kahan"), ("adamw", "float32", "none")],
)
def test_the_same_core_functions_run_on_numpy_and_jax(rule, dtype, compensation) -> None:
    row = ADAM_FAMILY[rule]
    hyperparameters = AdamHyperparameters(**{**row.defaults, "weight_decay": 0.1}, learning_rate=1e-2)
    results = []
    for ops in (numpy_ops, jax_ops):
        start, *grads = (np.random.default_rng(seed).normal(size=(50,)).astype(np.float32) for seed in range(4))
        parameter = ops.cast(start, dtype)
        state = init_state(ops, parameter, state_dtypes(row.fields, dtype, row.betas), compensation)
        for t, gradient in enumerate(grads, 1):
            corrections = bias_corrections(hyperparameters, t, ops.xp)
            gradient = ops.cast(gradient, dtype)
            parameter, state = update(
                ops, ADAM_FAMILY[rule], hyperparameters, corrections, compensation, parameter, gradient, state
            )
        results.append([ops.cast(leaf, "float32") for leaf in (parameter, *state.fields)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6 if dtype == "float32" else 2**-7, atol=1e-7)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu", "PATH": "", **environment}
    return subprocess.run([sys.executable, "-W", "error", "-c", code], env=path, capture_output=True, text=True)


@pytest.mark.parametrize("package", ["jax", "optax"])
def test_a_missing_package_is_named_with_the_remedy(package) -> None:
    done = run(
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        "from penstock.core.errors import MissingDependencyError\n"
        "try: import penstock.jax_frontend\n"
        "except MissingDependencyError as error: print(error)"
    )
    assert package in done.stdout, done.stderr
    assert "pip install penstock[jax]" in done.stdout
