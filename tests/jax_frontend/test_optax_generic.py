"""Optax's own generic tests, those that the installed Optax ships, pointed at these transforms.

Optax runs each of them over a table of its optimizers, by name. Here the names are put where Optax looks for them, and the
functions behind the tables are called with them. Tests that the installed version does not have are skipped.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.conftest import XLA_FLAGS
from tests.support.rows import rows

from penstock.jax_frontend import adam, adamw, compensated, scale_by_stable_adam, stable_adamw

SOURCES = Path(__file__).resolve().parents[2] / "src"
OURS = {"stable_adamw": stable_adamw, "adamw": adamw, "adam": adam, "compensated": compensated}
ALONE: dict[str, dict[str, Any]] = {
    "stable_adamw": {"opt_name": "stable_adamw", "opt_kwargs": {"learning_rate": 1e-2, "weight_decay": 1e-4}},
    "adamw": {"opt_name": "adamw", "opt_kwargs": {"learning_rate": 1e-1, "weight_decay": 1e-4}},
    "adam": {"opt_name": "adam", "opt_kwargs": {"learning_rate": 1e-1}},
}
NO_WRAPPER = {"wrapper_name": None, "wrapper_kwargs": None}
TABLE: dict[str, dict[str, Any]] = {
    **{name: {**row, **NO_WRAPPER} for name, row in ALONE.items()},
    "compensated": {
        "opt_name": "sgd",
        "opt_kwargs": {"learning_rate": 1e-3, "momentum": 0.9},
        "wrapper_name": "compensated",
        "wrapper_kwargs": {"compensation": "kahan"},
    },
}
ROWS = pytest.mark.parametrize("row", rows(TABLE, ("stable_adamw", "compensated").__contains__))
ROWS_ALONE = pytest.mark.parametrize("row", rows(ALONE, ["stable_adamw"].__contains__))
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


class _NotInstalled(types.ModuleType):
    """Stands in for scikit-learn, which Optax's module imports for tests of L-BFGS that are not run here."""

    datasets = linear_model = None


@pytest.fixture
def shipped(monkeypatch) -> Callable[..., Callable[..., None]]:
    """(module, test) -> the function of a test that Optax ships, with these transforms in the place of its own."""

    def find(module_name: str, test: str) -> Callable[..., None]:
        with monkeypatch.context() as context:
            if importlib.util.find_spec("sklearn") is None:
                context.setitem(sys.modules, "sklearn", _NotInstalled("sklearn"))
            module: Any = pytest.importorskip(f"optax.{module_name}")
        for place in (optax.contrib, module.alias):
            for name, function in OURS.items():
                monkeypatch.setattr(place, name, function, raising=False)
        for case in vars(module).values():
            for name, function in vars(case).items() if isinstance(case, type) else ():
                if name.startswith(test):
                    return types.MethodType(inspect.unwrap(function), _instance(case))
        pytest.skip(f"optax.{module_name} has no {test}")

    return find


def _instance(case: type) -> Any:
    """Of Optax's test case. Older ones run their tests in variants, by the attribute `variant`: jitted here."""
    return type(case.__name__, (case,), {"variant": staticmethod(jax.jit)})()


@ROWS
@pytest.mark.parametrize("target", ["parabola", "rosenbrock", "matrix_parabola", "mixed_tensor_target"])
def test_optimizers(shipped, row, target) -> None:
    test = shipped("contrib._common_test", "test_optimizers0")
    setup = getattr(sys.modules["optax.contrib._common_test"], f"_setup_{target}")
    test(**TABLE[row], target=setup, dtype="float32")


@ROWS
def test_optimizers_accept_extra_args(shipped, row) -> None:
    shipped("contrib._common_test", "test_optimizers_accept_extra_args")(**TABLE[row], wrap=True)


@ROWS
def test_optimizers_can_be_wrapped_in_inject_hyperparams(shipped, row, monkeypatch) -> None:
    """Optax wants a state of the same structure; it has two numbers more where b1 and b2 are injected."""
    for name in ALONE:
        make = OURS[name]
        alone = lambda learning_rate, weight_decay=0.0, make=make: make(learning_rate, weight_decay=weight_decay)  # noqa: E731
        alone.__signature__ = inspect.Signature(list(inspect.signature(alone).parameters.values())[:2])
        monkeypatch.setitem(OURS, name, alone)
    shipped("contrib._common_test", "test_optimizers_can_be_wrapped_in_inject_hyperparams")(**TABLE[row])


@ROWS
@DTYPES
def test_preserve_dtype(shipped, row, dtype) -> None:
    shipped("contrib._common_test", "test_preserve_dtype")(**TABLE[row], dtype=dtype)


@ROWS
@DTYPES
def test_gradient_accumulation(shipped, row, dtype) -> None:
    shipped("contrib._common_test", "test_gradient_accumulation")(**TABLE[row], dtype=dtype)


@ROWS_ALONE  # it takes no wrappers
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_state_shape_dtype_shard_stability(shipped, row, dtype) -> None:
    shipped("contrib._common_test", "test_state_shape_dtype_shard_stability")(**TABLE[row], dtype=dtype)


@ROWS_ALONE
@pytest.mark.parametrize("target", ["parabola", "rosenbrock"])
def test_optimization_one_step_after_the_other(shipped, row, target) -> None:
    test = shipped("_src.alias_test", "test_optimization")
    test(**ALONE[row], target=getattr(sys.modules["optax._src.alias_test"], f"_setup_{target}"), dtype=jnp.float32)


FLOATING = ("bfloat16", "float32", None)


@pytest.mark.parametrize(
    ("name", "params_dtype", "state_dtype"), list(itertools.product(("adam", "adamw"), FLOATING, FLOATING))
)
def test_explicit_dtype(shipped, name, params_dtype, state_dtype, monkeypatch) -> None:
    """The first moment is looked up by its own name."""
    test = shipped("_src.alias_test", "test_explicit_dtype")
    for place, function in (("tree", "get"), ("tree_utils", "tree_get")):
        if hasattr(getattr(optax, place, None), function):
            monkeypatch.setattr(f"optax.{place}.{function}", lambda state, _: state.fields["exp_avg"])
    test(params_dtype=params_dtype, state_dtype=state_dtype, opt_name=name)


@pytest.mark.parametrize("function", [stable_adamw, adamw, adam, scale_by_stable_adam])
def test_mixed_dtype_input_outputs(shipped, function) -> None:
    options = {} if function is scale_by_stable_adam else {"learning_rate": 0.1}
    try:
        shipped("_src.float64_test", "test_mixed_dtype_input_outputs")(transform_constr=function, transform_kwargs=options)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_sharding() -> None:
    """In a process of its own, with the devices that Optax's module asks for."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            """
import importlib.util, inspect, warnings
if importlib.util.find_spec("optax._src.sharding_test") is None:
    print("missing")
    raise SystemExit
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Optax's module makes of Optax's own optimizers
    from optax._src import sharding_test
import jax
from penstock.jax_frontend import adam, compensated, stable_adamw
if not hasattr(jax, "set_mesh") or not hasattr(jax, "P"):
    print("missing")
    raise SystemExit
jax.__version__ = "9"  # Optax compares versions as strings, by which 0.10 comes before 0.7
case = sharding_test.ShardingTest
transforms = (stable_adamw(1.0), adam(1.0), compensated(adam(1.0, compensation="none")))
tests = {inspect.unwrap(getattr(case, name)) for name in dir(case) if name.startswith("test_")}
tests = [test for test in tests if "optimizer" in inspect.signature(test).parameters]
for transform in transforms:
    for test in tests:
        test(case(), transform)
print(len(tests), "tests of", len(transforms))
""",
        ],
        env={"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu", "PATH": "", "XLA_FLAGS": " ".join(XLA_FLAGS[1:])},
        capture_output=True,
        text=True,
    )
    if done.stdout == "missing\n":
        pytest.skip("this Optax ships no sharding tests, or this jax has no explicit sharding")
    assert done.stdout == "3 tests of 3\n", done.stderr
