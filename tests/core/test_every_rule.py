"""The laws of every rule, each a row of `RULES`; what only Adam and its relatives obey is in `test_update.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.support.jax_training import float64

from penstock.core import rules
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.compensation import possible
from penstock.core.dtypes import state_dtypes
from penstock.core.errors import RefusedError
from penstock.core.hyperparameters import Hyperparameters
from penstock.core.reference import Change, Gradient, Reference, Settings
from penstock.core.rules import RULES, Rule
from penstock.core.update import TensorState, init_state, update
from penstock.jax_frontend.array_ops import JaxOps
from penstock.torch_frontend.array_ops import torch_ops

EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
STEPS = 40
KINDS = ((numpy_ops, np.asarray), (torch_ops, torch.tensor), (JaxOps(), jnp.asarray))


def hyperparameters(rule: Rule, **changed: Any) -> Hyperparameters:
    return rule.hyperparameters(**{**rule.defaults, "learning_rate": 1e-2, "weight_decay": 0.1, **changed})


def start(rule: Rule, ops: Any, parameter: Any, compensation: str = "none") -> TensorState:
    dtypes = state_dtypes(rule.fields, ops.dtype_name(parameter), rule.decays(hyperparameters(rule)))
    return init_state(ops, parameter, dtypes, compensation)


def gradients(seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(3, 5)) for _ in range(STEPS)]


@EVERY_RULE
def test_it_says_all_of_itself(rule: Rule) -> None:
    """Frontends make signatures, states, files and docstrings of it."""
    own = set(rule.own_hyperparameters)
    assert own | {"weight_decay"} <= set(rule.defaults) <= own | {"weight_decay", "learning_rate"}
    assert {field.beta for field in rule.fields} - {None} <= own
    assert len({field.name for field in rule.fields}) == len(rule.fields)
    assert rule.title
    assert rule.mathematics.strip()
    assert "https://" in rule.source


@pytest.mark.parametrize("changed", [{}, {"maximize": True}, {"weight_decay": 0.0}], ids=str)
@EVERY_RULE
def test_it_equals_the_reference_while_its_learning_rate_changes(rule: Rule, changed: dict[str, Any]) -> None:
    values = {"weight_decay": 0.1, **changed}
    reference = Reference(
        Settings(rule.name, 1e-2, rule.betas, rule.defaults.get("eps", 0.0), **values), {"p": np.ones((3, 5))}
    )
    parameter, state = np.ones((3, 5)), start(rule, numpy_ops, np.ones((3, 5)))
    for step, gradient in enumerate(gradients(), 1):
        rate = 1e-2 / step**0.5
        reference.run(Change({"lr": rate}))
        reference.run(Gradient("p", gradient))
        current = hyperparameters(rule, learning_rate=rate, **changed)
        parameter, state = update(
            numpy_ops, rule, current, rule.corrections(current, step, np), "none", parameter, gradient, state
        )
    np.testing.assert_allclose(parameter, reference.tensors["p"].parameter, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@EVERY_RULE
def test_the_same_functions_run_on_numpy_torch_and_jax(rule: Rule, dtype: str) -> None:
    """Within a rounding of the parameter a step, with its best compensation; JAX may contract products and sums."""
    compensation, current, found = possible(dtype)[-1], hyperparameters(rule), []
    for ops, of in KINDS:
        parameter = ops.cast(of(np.ones((3, 5), np.float32)), dtype)
        state = start(rule, ops, parameter, compensation)
        for step, gradient in enumerate(gradients()[:10], 1):
            corrections = rule.corrections(current, step, np)
            given = ops.cast(of(gradient.astype(np.float32)), dtype)
            parameter, state = update(ops, rule, current, corrections, compensation, parameter, given, state)
        found.append([np.asarray(ops.cast(array, "float32")) for array in (parameter, *state.fields)])
    eps = float(np.finfo(np.float32).eps) if dtype == "float32" else float(jnp.finfo(dtype).eps)
    for arrays in found[1:]:
        for array, expected in zip(arrays, found[0], strict=True):
            np.testing.assert_allclose(array, expected, rtol=10 * eps, atol=10 * eps * 1e-2)


@EVERY_RULE
def test_a_learning_rate_of_zero_keeps_every_bit_of_the_parameter(rule: Rule) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for compensation in possible(dtype):
            parameter = np.linspace(-2, 2, 15).reshape(3, 5).astype(numpy_dtype(dtype))
            new, state, current = (
                parameter,
                start(rule, numpy_ops, parameter, compensation),
                hyperparameters(rule, learning_rate=0.0),
            )
            for step, gradient in enumerate(gradients()[:5], 1):
                corrections = rule.corrections(current, step, np)
                new, state = update(
                    numpy_ops, rule, current, corrections, compensation, new, gradient.astype(parameter.dtype), state
                )
            assert new.tobytes() == parameter.tobytes()


@EVERY_RULE
def test_fields_without_memory_hold_the_gradient_alone(rule: Rule) -> None:
    """Decays of 0: m + (g-m) would keep the rounding errors of a large m."""
    none = {name: 0.0 for name in rule.own_hyperparameters if name.startswith("beta")}
    current, small = hyperparameters(rule, weight_decay=0.0, **none), np.full(3, 1e-4, np.float32)
    for ops, of in KINDS:
        parameter, state = of(np.zeros(3, np.float32)), start(rule, ops, of(np.zeros(3, np.float32)))
        for step, gradient in enumerate((np.full(3, 1e4, np.float32), small), 1):
            before, corrections = parameter, rule.corrections(current, step, np)
            parameter, state = update(ops, rule, current, corrections, "none", parameter, of(gradient), state)
        np.testing.assert_allclose(parameter, before - 1e-2, rtol=2e-2)  # a hundredth is eps, beside 1e-4
        for field, array in zip(rule.fields, state.fields, strict=True):
            np.testing.assert_array_equal(array, small * small if field.of_squares else small)


@EVERY_RULE
def test_a_nan_in_the_gradient_is_a_nan_in_the_parameter(rule: Rule) -> None:
    """torch.sign makes 0 of a NaN: a parameter would stay where it is for ever, and nobody see why."""
    current, gradient = hyperparameters(rule), np.array([np.nan, 1.0], np.float32)
    for ops, of in KINDS:
        parameter = of(np.ones(2, np.float32))
        new, _ = update(
            ops, rule, current, rule.corrections(current, 1, np), "none", parameter, of(gradient), start(rule, ops, parameter)
        )
        assert np.isnan(np.asarray(new))[0]


@EVERY_RULE
def test_accumulation_in_the_state_is_refused_where_the_step_needs_the_gradient(rule: Rule) -> None:
    if rule.needs_gradient:
        with pytest.raises(RefusedError, match=f"not possible for {rule.name}, .*; use 'hold'"):
            rule.check_accumulates("use 'hold'")
    else:
        rule.check_accumulates("use 'hold'")


PEERS = {
    "lion": functools.partial(optax.lion, weight_decay=0.1),
    "adamw": functools.partial(optax.adamw, weight_decay=0.1),
}
"""The transforms that define rules, with the same defaults otherwise."""


@pytest.mark.parametrize("name", PEERS)
def test_it_equals_what_defines_it_in_float64(name: str) -> None:
    rule, given = RULES[name], gradients()
    parameter, state = np.ones((3, 5)), start(RULES[name], numpy_ops, np.ones((3, 5)))
    current = hyperparameters(rule)
    with float64():
        theirs, tx = jnp.ones((3, 5), jnp.float64), PEERS[name](1e-2)
        kept, apply = tx.init(theirs), jax.jit(tx.update)
        for step, gradient in enumerate(given, 1):
            corrections = rule.corrections(current, step, np)
            parameter, state = update(numpy_ops, rule, current, corrections, "none", parameter, gradient, state)
            updates, kept = apply(jnp.asarray(gradient), kept, theirs)
            theirs = optax.apply_updates(theirs, updates)
        np.testing.assert_allclose(parameter, theirs, rtol=1e-12)


def test_every_rule_is_in_the_registry() -> None:
    assert {rule.name for rule in vars(rules).values() if isinstance(rule, Rule)} == set(RULES)
