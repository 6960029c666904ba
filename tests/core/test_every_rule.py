"""The laws of every rule, each a row of `RULES`; what only Adam and its relatives obey is in `test_update.py`."""

from __future__ import annotations

import decimal
import functools
import inspect
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from tests.support.jax_training import float64
from tests.support.rules import reference_settings

from penstock.core import rules
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.codings import state_dtypes
from penstock.core.compensation import possible
from penstock.core.errors import RefusedError
from penstock.core.hyperparameters import DECAY, Hyperparameters
from penstock.core.reference import Change, Gradient, Reference
from penstock.core.rules import RULES, Rule, radam
from penstock.core.update import TensorState, accumulate, apply, init_state, update
from penstock.jax_frontend.array_ops import JaxOps
from penstock.torch_frontend.array_ops import torch_ops

EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
STEPS = 40
IN_COMPUTE_DTYPE = {"ns_dtype": "float32"}
"""Muon as the reference has it; `test_muon` compares its bfloat16 iterations."""
KINDS = ((numpy_ops, np.asarray), (torch_ops, torch.tensor), (JaxOps(), jnp.asarray))


def hyperparameters(rule: Rule, **changed: Any) -> Hyperparameters:
    changed = {**IN_COMPUTE_DTYPE, **changed} if "ns_dtype" in rule.defaults else changed
    return rule.hyperparameters(**{**rule.defaults, "learning_rate": 1e-2, "weight_decay": 0.1, **changed})


def start(rule: Rule, ops: Any, parameter: Any, compensation: str = "none") -> TensorState:
    dtypes = state_dtypes(rule.fields, ops.dtype_name(parameter), rule.decays(hyperparameters(rule)))
    return init_state(ops, rule, parameter, dtypes, compensation)


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
    reference = Reference(reference_settings(rule, 1e-2, **{"weight_decay": 0.1, **changed}), {"p": np.ones((3, 5))})
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
    """Decays of 0: m + (g-m) would keep the rounding errors of a large m. A spike is forgotten."""
    none: dict[str, Any] = {name: 0.0 for name, allowed in rule.hyperparameters.RANGES.items() if allowed is DECAY}
    if "nesterov" in rule.defaults:
        none["nesterov"] = False  # it needs a momentum
    current, small, spike = hyperparameters(rule, **none), np.full((1, 3), 1e-4, np.float32), np.full((1, 3), 1e4, np.float32)
    for ops, of in KINDS:
        zeros = of(np.zeros((1, 3), np.float32))
        shared = (ops, rule, current)
        fresh = start(rule, ops, zeros)
        _, spiked = update(*shared, rule.corrections(current, 1, np), "none", zeros, of(spike), fresh)
        pairs = zip(rule.fields, spiked.fields, fresh.fields, strict=True)
        own = (
            "prev_grad",
            "lookahead",
        )  # a difference to the spike, and the way from where Ranger goes back to
        forgotten = fresh._replace(fields=tuple(old if field.name in own else new for field, old, new in pairs))
        runs = [update(*shared, rule.corrections(current, 2, np), "none", zeros, of(small), s) for s in (spiked, forgotten)]
        for found, expected in zip(*([parameter, *state.fields] for parameter, state in runs), strict=True):
            np.testing.assert_array_equal(found, expected)


@EVERY_RULE
def test_a_nan_in_the_gradient_is_a_nan_in_the_parameter(rule: Rule) -> None:
    """torch.sign makes 0 of a NaN: a parameter would stay where it is for ever, and nobody see why."""
    current, gradient = hyperparameters(rule), np.array([[np.nan, 1.0]], np.float32)
    for ops, of in KINDS:
        parameter = of(np.ones((1, 2), np.float32))
        new, _ = update(
            ops, rule, current, rule.corrections(current, 1, np), "none", parameter, of(gradient), start(rule, ops, parameter)
        )
        assert np.isnan(np.asarray(new))[0, 0]


@EVERY_RULE
def test_its_own_defaults_choose_it(rule: Rule) -> None:
    """So every row of a rule with variants can be had by settings."""
    assert rule.row({name: rule.defaults[name] for name in rule.own_hyperparameters}) is rule


@EVERY_RULE
def test_accumulation_in_the_state_is_refused_where_the_step_needs_the_gradient(rule: Rule) -> None:
    if rule.needs_gradient:
        with pytest.raises(RefusedError, match=f"not possible for {rule.name}, .*; use 'hold'"):
            rule.check_accumulates("use 'hold'")
    else:
        rule.check_accumulates("use 'hold'")


@EVERY_RULE
def test_micro_batches_in_the_state_are_the_references_and_the_whole_batch_where_the_rule_is_linear(rule: Rule) -> None:
    """Decay and L2 once an update, and no dampening in all of the first one; and one micro-batch is the plain update."""
    if rule.needs_gradient:
        return
    damped: dict[str, Any] = {"dampening": 0.3} if "dampening" in rule.defaults else {}
    current, found = hyperparameters(rule, **damped), []
    settings = reference_settings(rule, 1e-2, weight_decay=0.1, accumulation="state", **damped)
    for count in (1, 3):
        parameter, reference = np.ones((1, 5)), Reference(settings, {"p": np.ones((1, 5))})
        state = start(rule, numpy_ops, parameter)
        for step, batch in enumerate(gradients()[:8], 1):
            common = (numpy_ops, rule, current, rule.corrections(current, step, np), "none")
            *earlier, last = (np.sum(part, axis=0, keepdims=True) for part in np.split(batch, count))
            for number, gradient in enumerate(earlier):
                state = accumulate(*common, parameter, gradient, state, first=number == 0)
                reference.run(Gradient("p", gradient, last=False))
            reference.run(Gradient("p", last))
            if step % 2:
                parameter, state = update(*common, parameter, last, state, first=not earlier)
            else:
                state = accumulate(*common, parameter, last, state, first=not earlier)
                parameter, state = apply(*common, parameter, state)
        np.testing.assert_allclose(parameter, reference.tensors["p"].parameter, rtol=1e-12, atol=1e-14)
        found.append(parameter)
    assert np.allclose(*found, rtol=1e-12, atol=1e-14) == rule.linear


def through_optax(tx: optax.GradientTransformation, given: list[np.ndarray]) -> np.ndarray:
    with float64():
        params = jnp.ones((3, 5), jnp.float64)
        state, step = tx.init(params), jax.jit(tx.update)
        for gradient in given:
            updates, state = step(jnp.asarray(gradient), state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params)


def through_torch(kind: Any, given: list[np.ndarray], **settings: Any) -> np.ndarray:
    parameter = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    optimizer = kind([parameter], lr=1e-2, **settings)
    for gradient in given:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.detach().numpy()


def through_torch_muon(given: list[np.ndarray], **settings: Any) -> np.ndarray:
    """torch.optim.Muon's own iteration, where it converts to bfloat16, stays in float64."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no torch.optim.Muon")
    name = settings["adjust_lr_fn"]
    if name == "spectral_unclamped" and name not in (torch.optim.Muon.__doc__ or ""):
        pytest.skip("this torch.optim.Muon does not have the scale")
    # Which of them it is depends on the torch.
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone), mock.patch.object(torch, "bfloat16", torch.float64):
        return through_torch(torch.optim.Muon, given, **settings)


def through_optax_muon(given: list[np.ndarray], **settings: Any) -> np.ndarray:
    """Without Nesterov, where Optax debiases by two counts; with an eps that is nothing beside a norm: Optax adds it."""
    rms = {"consistent_rms": 0.2} if settings["adjust_lr_fn"] else {}
    if not {"consistent_rms"} & rms.keys() <= inspect.signature(optax.contrib.muon).parameters.keys():
        pytest.skip("this optax has no consistent_rms")
    tx = optax.contrib.muon(
        1e-2, eps=settings["eps"], beta=settings["momentum"], weight_decay=settings["weight_decay"], nesterov=False, **rms
    )
    return through_optax(tx, given)


def through_optimi_ranger(given: list[np.ndarray], decoupled_weight_decay: bool = True, **settings: Any) -> np.ndarray:
    return through_torch(pytest.importorskip("optimi").Ranger, given, decouple_wd=decoupled_weight_decay, **settings)


def every(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


PEERS = {
    "lion": lambda given, **settings: through_optax(optax.lion(1e-2, **settings), given),
    "adamw": lambda given, **settings: through_optax(optax.adamw(1e-2, **settings), given),
    "sgd": functools.partial(through_torch, torch.optim.SGD),
    "radam": functools.partial(through_torch, torch.optim.RAdam),
    "ranger": through_optimi_ranger,
    "muon": through_torch_muon,
    "muon_momentum": through_optax_muon,
    "adan": lambda given, **settings: through_torch(pytest.importorskip("optimi").Adan, given, **settings),
}
"""What defines rules, with the same defaults otherwise."""

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lion": [{"weight_decay": 0.1}],
    "adamw": [{"weight_decay": 0.1}],
    "sgd": [
        settings
        for settings in every(
            momentum=(0.0, 0.9), dampening=(0.0, 0.3), nesterov=(False, True), weight_decay=(0.0, 0.1), maximize=(False, True)
        )
        if not settings["nesterov"] or (settings["momentum"] and not settings["dampening"])
    ],
    "ranger": [
        {},
        {"betas": (0.9, 0.999), "k": 3, "alpha": 0.8, "weight_decay": 0.1, "eps": 1e-3},
        {"k": 1, "weight_decay": 0.1, "decoupled_weight_decay": False},
        {"weight_decay": 1e-4, "decouple_lr": True, "max_lr": 0.02},
    ],
    "muon": [
        {"momentum": 0.8, "weight_decay": 0.3, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1.0, **settings}
        for settings in every(nesterov=(False, True), adjust_lr_fn=(None, "original", "match_rms_adamw", "spectral_unclamped"))
    ],
    "muon_momentum": [
        {"momentum": 0.9, "weight_decay": 0.3, "eps": 1e-20, "output_axis": 1, "adjust_lr_fn": name}
        for name in (None, "match_rms_adamw")
    ],
    "adan": [{}, {"betas": (0.9, 0.5, 0.8), "weight_decay": 0.3}, {"weight_decay": 1e-4, "decouple_lr": True, "max_lr": 0.02}],
    "radam": [
        {"betas": betas, **settings}
        for betas in ((0.9, 0.999), (0.5, 0.9), (0.9, 0.6))  # the last is never rectified
        for settings in every(weight_decay=(0.0, 0.1), decoupled_weight_decay=(False, True), maximize=(False, True))
    ],
}


@pytest.mark.parametrize(("name", "settings"), [(name, one) for name, given in SETTINGS.items() for one in given], ids=str)
def test_it_equals_what_defines_it_in_float64(name: str, settings: dict[str, Any]) -> None:
    public, given = RULES[name], gradients()
    own = IN_COMPUTE_DTYPE if "ns_dtype" in public.defaults else {}
    ours = {**public.defaults, **own, **settings, "learning_rate": 1e-2}
    ours |= {f"beta{number}": beta for number, beta in enumerate(ours.pop("betas", ()), 1)}
    rule = public.row(ours)
    current = rule.hyperparameters(**ours)
    parameter, state = np.ones((3, 5)), start(rule, numpy_ops, np.ones((3, 5)))
    for step, gradient in enumerate(given, 1):
        corrections = rule.corrections(current, step, np)
        parameter, state = update(numpy_ops, rule, current, corrections, "none", parameter, gradient, state)
    np.testing.assert_allclose(parameter, PEERS[name](given, **settings), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("xp", [np, torch, jnp], ids=["numpy", "torch", "jax"])
def test_radam_knows_how_many_gradients_its_second_moment_has_seen_in_float32(xp: Any) -> None:
    """Within 32 roundings, for every beta2: eight of them may be lost where the series ends, each of four operations."""
    for beta2 in (0.9, 0.99, 0.999, 0.9999, 1 - 1e-6):
        for step in (2, 5, 6, 7, 50, 240, 260, 3000, 10**5):
            with decimal.localcontext(prec=60):
                beta = decimal.Decimal(beta2)
                exact = (1 + beta) / (1 - beta) - 2 * step * beta**step / (1 - beta**step)
            found = radam.averaged_gradients(beta2, xp.asarray(step, dtype=xp.float32), xp)
            np.testing.assert_allclose(float(found), float(exact), rtol=32 * 2.0**-24)


def test_every_rule_is_in_the_registry() -> None:
    assert {rule for rule in vars(rules).values() if isinstance(rule, Rule)} <= set(RULES.values())
