"""The specification against the reference, torch.optim and optax; and against itself on every kind of array."""

from __future__ import annotations

from decimal import Decimal, getcontext

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.support.jax_training import float64
from tests.support.rules import ADAM_FAMILY

from penstock.core import compensation as compensations
from penstock.core.array_ops import numpy_dtype, numpy_ops
from penstock.core.codings import state_dtypes
from penstock.core.compensation import Stored
from penstock.core.debiasing import corrected_one_minus_beta
from penstock.core.reference import Change, Gradient, Reference, Settings
from penstock.core.rules import ADAM, ADAMW, STABLE_ADAMW, Rule
from penstock.core.rules.adam_family import SMALLEST_NORMAL_FLOAT32, AdamHyperparameters, bias_corrections
from penstock.core.update import TensorState, accumulate, init_state, rebiased, update
from penstock.jax_frontend.array_ops import JaxOps
from penstock.torch_frontend.array_ops import torch_ops

STEPS = 60
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1


def hyperparameters(rule: Rule, **changed: object) -> AdamHyperparameters:
    values = {**rule.defaults, "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return AdamHyperparameters(**{**values, **changed})


def settings(rule: Rule, **changed: object) -> Settings:
    values = {
        "rule": rule.name,
        "lr": LEARNING_RATE,
        "betas": rule.betas,
        "eps": rule.defaults["eps"],
        "weight_decay": WEIGHT_DECAY,
    }
    return Settings(**{**values, **changed})


def gradients(shape: tuple[int, ...], steps: int = STEPS, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    spikes = np.where(np.arange(steps) % 17 == 16, 30.0, 1.0)  # so that update clipping has something to clip
    return [generator.normal(size=shape) * spike for spike in spikes]


def run(ops, rule: Rule, parameter, gradient_list, compensation: str = "none", **changed: object):
    current = hyperparameters(rule, **changed)
    dtype = ops.dtype_name(parameter)
    state = init_state(ops, ADAM, parameter, state_dtypes(ADAM.fields, dtype, (0.9, current.beta2)), compensation)
    for step, gradient in enumerate(gradient_list, 1):
        corrections = bias_corrections(current, step, np)
        parameter, state = update(ops, rule, current, corrections, compensation, parameter, gradient, state)
    return parameter, state


def relative_error(found, expected) -> float:
    """Largest error relative to the largest value."""
    return float(np.max(np.abs(np.asarray(found) - expected)) / np.max(np.abs(expected)))


@pytest.mark.parametrize("changed", [{}, {"maximize": True}, {"decouple_lr": True, "max_lr": 0.02}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("rule", ADAM_FAMILY.values(), ids=lambda rule: rule.name)
def test_float64_equals_the_reference(rule: Rule, changed: dict) -> None:
    if rule.l2 and "decouple_lr" in changed:
        changed = {}
    start = np.random.default_rng(1).normal(size=(7, 5))
    reference = Reference(settings(rule, **changed), {"p": start})
    for gradient in gradients(start.shape):
        reference.run(Gradient("p", gradient))
    found, _ = run(numpy_ops, rule, start, gradients(start.shape), **changed)
    assert relative_error(found, reference.tensors["p"].parameter) < 1e-12


@pytest.mark.parametrize(("rule", "peer"), [(ADAMW, torch.optim.AdamW), (ADAM, torch.optim.Adam)], ids=["adamw", "adam"])
def test_the_reference_equals_torch(rule: Rule, peer: type[torch.optim.Optimizer]) -> None:
    start = np.random.default_rng(1).normal(size=(7, 5))
    parameter = torch.tensor(start, requires_grad=True)
    optimizer = peer([parameter], lr=LEARNING_RATE, betas=rule.betas, eps=rule.defaults["eps"], weight_decay=WEIGHT_DECAY)
    reference = Reference(settings(rule), {"p": start})
    for gradient in gradients(start.shape):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        reference.run(Gradient("p", gradient))
        assert relative_error(parameter.detach(), reference.tensors["p"].parameter) < 1e-12


def test_the_reference_equals_optax() -> None:
    start = np.random.default_rng(1).normal(size=(7, 5))
    with float64():
        transform = optax.adamw(LEARNING_RATE, *ADAMW.betas, eps=ADAMW.defaults["eps"], weight_decay=WEIGHT_DECAY)
        parameter = jnp.asarray(start)
        state = transform.init(parameter)
        reference = Reference(settings(ADAMW), {"p": start})
        for gradient in gradients(start.shape):
            updates, state = transform.update(jnp.asarray(gradient), state, parameter)
            parameter = optax.apply_updates(parameter, updates)
            reference.run(Gradient("p", gradient))
        assert relative_error(parameter, reference.tensors["p"].parameter) < 1e-12


def test_the_reference_follows_a_trajectory_derived_by_hand() -> None:
    """StableAdamW on two elements, three steps, worked out in 40-digit decimals from the papers' formulas."""
    getcontext().prec = 40
    beta1, beta2, eps = Decimal("0.9"), Decimal("0.99"), Decimal("1e-6")
    lr, decay = Decimal("0.01"), Decimal("0.1")
    given = [(Decimal(1), Decimal("-0.5")), (Decimal(3), Decimal("0.25")), (Decimal("-0.125"), Decimal(8))]
    p, m, v = [Decimal(1), Decimal(-2)], [Decimal(0)] * 2, [Decimal(0)] * 2
    reference = Reference(settings(STABLE_ADAMW, eps=1e-6), {"p": np.array([1.0, -2.0])})
    for t, g in enumerate(given, 1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        v_hat = [a / (1 - beta2**t) for a in v]
        mean_square = sum(b * b / max(a, eps * eps) for a, b in zip(v_hat, g, strict=True)) / 2
        eta = lr / max(Decimal(1), mean_square.sqrt())
        p = [x - eta * (a / (1 - beta1**t) / (b.sqrt() + eps) + decay * x) for x, a, b in zip(p, m, v_hat, strict=True)]
        reference.run(Gradient("p", [float(b) for b in g]))
        assert relative_error(reference.tensors["p"].parameter, np.array([float(x) for x in p])) < 1e-12
    assert p[0] < Decimal("0.98")  # it moved


@pytest.mark.parametrize("rule", ADAM_FAMILY.values(), ids=lambda rule: rule.name)
def test_numpy_torch_and_jax_arrays_go_through_the_same_functions(rule: Rule) -> None:
    start = np.random.default_rng(2).normal(size=33).astype(np.float32)
    given = [gradient.astype(np.float32) for gradient in gradients(start.shape)]
    plain, _ = run(numpy_ops, rule, start, given)
    in_torch, _ = run(torch_ops, rule, torch.tensor(start), [torch.tensor(g) for g in given])
    in_jax, _ = run(JaxOps(), rule, jnp.asarray(start), [jnp.asarray(g) for g in given])
    for other in (in_torch.numpy(), np.asarray(in_jax)):
        assert other.dtype == np.float32
        # Only mean and sqrt may round differently: one unit in the last place a step.
        assert relative_error(other, plain) < STEPS * 2.0**-24


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_complements_of_arrays_are_those_of_numbers(beta: float) -> None:
    """A beta or a step on a device: c = (1-beta)/(1-beta^t), 1 at the first step."""
    for step in (1, 7, 1000):
        expected = (1.0 - beta) / (1.0 - beta**step)
        for given in ((beta, step), (np.array(beta), step), (beta, np.array(step)), (np.array(beta), np.array(step))):
            assert abs(corrected_one_minus_beta(*given, np) / expected - 1.0) < 1e-12


def test_the_rules_have_the_defaults_of_their_papers_and_of_torch() -> None:
    adam, adamw = torch.optim.Adam([torch.zeros(1)]).defaults, torch.optim.AdamW([torch.zeros(1)]).defaults
    for rule, theirs in ((ADAM, adam), (ADAMW, adamw)):
        assert (rule.betas, rule.defaults["eps"], rule.defaults["weight_decay"]) == (
            theirs["betas"],
            theirs["eps"],
            theirs["weight_decay"],
        )
    assert (STABLE_ADAMW.betas, STABLE_ADAMW.defaults["eps"], STABLE_ADAMW.defaults["weight_decay"]) == (
        (0.9, 0.99),
        1e-6,
        1e-2,
    )
    assert np.finfo(np.float32).tiny == SMALLEST_NORMAL_FLOAT32


CASES = [
    ("float64", "none"),
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "kahan"),
    ("bfloat16", "split"),
    ("float16", "none"),
    ("float16", "kahan"),
]


@pytest.mark.parametrize(("dtype", "compensation"), CASES)
@pytest.mark.parametrize("size", [1e-4, 3.3e-3, 1.0, 100.0])
@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_a_constant_gradient_gives_a_direction_of_one(dtype: str, compensation: str, size: float, beta2: float) -> None:
    """|m/(sqrt(v)+eps)| = 1 within 1%, at every step, whatever the dtype of the state (eps far below the gradient)."""
    rule = ADAMW
    current = hyperparameters(rule, beta2=beta2, weight_decay=0.0)
    parameter = np.array([1.0, -1.0], numpy_dtype(dtype))
    gradient = np.array([size, -size]).astype(numpy_dtype(dtype))
    state = init_state(numpy_ops, ADAM, parameter, state_dtypes(ADAM.fields, dtype, (0.9, beta2)), compensation)
    for step in range(1, 400):
        corrections = bias_corrections(current, step, np)
        _, state = update(numpy_ops, rule, current, corrections, compensation, parameter, gradient, state)
        moments = [np.asarray(x).astype(np.float64) for x in state.fields]
        assert np.all(np.abs(np.abs(moments[0] / (np.sqrt(moments[1]) + rule.defaults["eps"])) - 1) < 0.01), step


@pytest.mark.parametrize(("dtype", "compensation"), CASES)
def test_a_steady_decay_is_not_lost(dtype: str, compensation: str) -> None:
    """lr 1e-4, weight_decay 0.1, gradient about zero, parameter 1.0: 0.9802 after 2000 steps, where bits are kept."""
    current = hyperparameters(STABLE_ADAMW, learning_rate=1e-4)
    parameter = np.ones(3, numpy_dtype(dtype))
    gradient = np.full(3, 1e-20).astype(parameter.dtype)
    state = init_state(numpy_ops, ADAM, parameter, state_dtypes(ADAM.fields, dtype, (0.9, current.beta2)), compensation)
    for step in range(1, 2001):
        corrections = bias_corrections(current, step, np)
        parameter, state = update(numpy_ops, STABLE_ADAMW, current, corrections, compensation, parameter, gradient, state)
    kept = np.asarray(compensations.load(numpy_ops, compensation, Stored(parameter, state.compensation)), np.float64)
    if (dtype, compensation) in (("bfloat16", "none"), ("float16", "none")):
        assert np.all(kept == 1.0)  # why compensation exists
    elif (dtype, compensation) == ("bfloat16", "kahan"):
        # k has 8 bits and is at most 2^-9 here, so that a step of 1e-5 is rounded by up to 2^-18, at each of 2000 steps.
        assert np.all(np.abs(kept - 0.9802) < 2000 * 2.0**-18)
    else:
        assert np.all(np.abs(kept - 0.9802) < 1e-3)


@pytest.mark.parametrize("rule", ADAM_FAMILY.values(), ids=lambda rule: rule.name)
def test_float32_drifts_less_than_one_and_a_half_millionths(rule: Rule) -> None:
    """Setting B: lr 1e-4, decay 0.1, |p| about 1, 2000 steps."""
    generator = np.random.default_rng(3)
    start = (1 + 0.1 * generator.normal(size=64)).astype(np.float32)
    given = [generator.normal(size=64).astype(np.float32) for _ in range(2000)]
    reference = Reference(settings(rule, lr=1e-4, betas=(0.9, 0.99), eps=1e-6), {"p": start})
    for gradient in given:
        reference.run(Gradient("p", gradient))
    found, _ = run(numpy_ops, rule, start, given, learning_rate=1e-4, beta2=0.99, eps=1e-6)
    expected = reference.tensors["p"].parameter
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1.5e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99, 0.999, 0.99999])
@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
def test_the_debiased_complement_keeps_its_digits(beta: float, step: int) -> None:
    getcontext().prec = 60
    exact = float((1 - Decimal(beta)) / (1 - Decimal(beta) ** step))
    assert corrected_one_minus_beta(beta, step, np) == pytest.approx(exact, rel=1e-15 * max(1, 1 / (1 - beta) ** 0.5))
    traced = corrected_one_minus_beta(beta, np.float32(step), np)  # as on a device: float32
    assert float(traced) == pytest.approx(exact, rel=2e-6 if step * (1 - beta) < 20 else 1e-6)


def test_parts_of_a_tensor_are_updated_with_the_mean_square_of_the_whole() -> None:
    """The last gradient is clipped, and its parts differ in size."""
    current, cuts = hyperparameters(STABLE_ADAMW), (slice(0, 3), slice(3, 11), slice(11, 11))
    whole = np.linspace(-1, 1, 11)
    parts = [whole[cut] for cut in cuts]
    dtypes = state_dtypes(ADAM.fields, "float64", (0.9, current.beta2))
    state = init_state(numpy_ops, STABLE_ADAMW, whole, dtypes, "none")
    states = [init_state(numpy_ops, STABLE_ADAMW, part, dtypes, "none") for part in parts]
    for step, gradient in enumerate(gradients((11,), 17), 1):
        common = (numpy_ops, STABLE_ADAMW, current, bias_corrections(current, step, np), "none")
        here = [gradient[cut] for cut in cuts]
        squares = [accumulate(*common, *given, first=True).mean_square for given in zip(parts, here, states, strict=True)]
        mean = sum(square * part.size for square, part in zip(squares, parts, strict=True)) / whole.size
        of_whole = accumulate(*common, whole, gradient, state, first=True).mean_square
        np.testing.assert_allclose(mean, of_whole, rtol=1e-14)
        updated = [update(*common, *given, mean_square=mean) for given in zip(parts, here, states, strict=True)]
        parts, states = [part for part, _ in updated], [kept for _, kept in updated]
        whole, state = update(*common, whole, gradient, state)
    assert mean > 10, "nothing was clipped"
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-14)


def test_zero_elements_and_no_dimensions() -> None:
    for shape in ((0,), (3, 0), ()):
        parameter, state = run(numpy_ops, STABLE_ADAMW, np.ones(shape), gradients(shape, 3))
        assert np.shape(parameter) == shape
        assert isinstance(state, TensorState)
        assert np.all(np.isfinite(parameter))


@pytest.mark.parametrize("rule", ADAM_FAMILY.values(), ids=ADAM_FAMILY)
def test_moments_under_new_betas_give_the_numbers_of_raw_moments(rule: Rule) -> None:
    """Zeros among them, in float64; the reference has raw moments."""
    start, given = np.linspace(-1.0, 1.0, 12).reshape(3, 4), gradients((3, 4), 40)
    betas = [(0.9, 0.99), (0.5, 0.99), (0.0, 0.9), (0.95, 0.0), (0.0, 0.0), (0.99, 0.999), (0.99, 0.999)]
    reference = Reference(settings(rule), {"p": start})
    parameter, before = start, betas[0]
    state = init_state(numpy_ops, ADAM, parameter, state_dtypes(ADAM.fields, "float64", (0.9, 0.99)), "none")
    for count, gradient in enumerate(given):
        beta1, beta2 = betas[count % len(betas)]
        reference.run(Change({"betas": (beta1, beta2)}))
        reference.run(Gradient("p", gradient))
        decays = zip(state.fields, before, (beta1, beta2), strict=True)
        state = state._replace(fields=tuple(rebiased(numpy_ops, field, count, old, new) for field, old, new in decays))
        current = hyperparameters(rule, beta1=beta1, beta2=beta2)
        corrections = bias_corrections(current, count + 1, np)
        parameter, state = update(numpy_ops, rule, current, corrections, "none", parameter, gradient, state)
        before = beta1, beta2
        np.testing.assert_allclose(parameter, reference.tensors["p"].parameter, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_moment_under_a_new_beta_is_the_same_on_every_kind_of_array(dtype: str) -> None:
    """Bit for bit with Python numbers; arrays of the numbers that change nothing leave every bit, too."""
    moment = np.random.default_rng(0).normal(size=500).astype(numpy_dtype(dtype))
    of = {numpy_ops: moment, JaxOps(): jnp.asarray(moment), torch_ops: torch.tensor(moment.astype(np.float32))}
    of[torch_ops] = torch_ops.cast(of[torch_ops], dtype)
    expected = np.asarray(rebiased(numpy_ops, moment, 5, 0.9, 0.7), np.float32)
    assert not np.array_equal(expected, np.asarray(moment, np.float32))
    for ops, array in of.items():
        found = ops.cast(rebiased(ops, array, 5, 0.9, 0.7), "float32")
        assert np.array_equal(np.asarray(found), expected)
        for step, before, after in ((5, 0.9, 0.9), (0, 0.9, 0.7), (5, 0.0, 0.0)):
            assert rebiased(ops, array, step, before, after) is array
            scalars = [
                np.float32(number) if ops is numpy_ops else ops.cast(ops.xp.asarray(number), "float32")
                for number in (step, before, after)
            ]
            same = rebiased(ops, array, *scalars)
            assert np.array_equal(np.asarray(ops.cast(same, "float32")), np.asarray(moment, np.float32))


STEP_LENGTHS = {  # rule, micro-gradients: (in step 1, in step 100) with the sum of the gradients, and one by one
    (ADAMW, "noise"): ((1.0e-2, 2.3e-3), (1.0e-2, 2.3e-3)),
    (ADAMW, "equal"): ((1.0e-2, 1.0e-2), (2.0e-2, 2.0e-2)),
    (STABLE_ADAMW, "noise"): ((1.0e-2, 2.3e-3), (0.7e-2, 2.3e-3)),
    (STABLE_ADAMW, "equal"): ((1.0e-2, 1.0e-2), (1.4e-2, 2.0e-2)),
}
"""Root mean squares of a step with 4 micro-batches, as the guides have them."""


@pytest.mark.parametrize(("rule", "regime"), STEP_LENGTHS)
def test_micro_batches_in_the_moments_step_as_far_as_their_sum_where_they_are_noise(rule: Rule, regime: str) -> None:
    """And sqrt(4) times as far where they agree."""
    given, count, size = hyperparameters(rule, weight_decay=0.0, eps=1e-12), 4, 10000
    for one_by_one, (first, last) in zip((False, True), STEP_LENGTHS[rule, regime], strict=True):
        generator = np.random.default_rng(0)
        p, state, lengths = np.zeros(size), TensorState((np.zeros(size), np.zeros(size)), None), {}
        for step in range(1, 101):
            corrections = bias_corrections(given, step, np)
            shares = (generator.normal(size=(count, size)) if regime == "noise" else np.ones((count, size))) / count
            parts = list(shares) if one_by_one else [shares.sum(0)]
            for index, share in enumerate(parts[:-1]):
                state = accumulate(numpy_ops, rule, given, corrections, "none", p, share, state, first=index == 0)
            old, one = p, len(parts) == 1
            p, state = update(numpy_ops, rule, given, corrections, "none", p, parts[-1], state, first=one)
            lengths[step] = np.sqrt(np.mean((p - old) ** 2))
        # Two digits; the root mean square of 10000 numbers is known to about a percent.
        np.testing.assert_allclose([lengths[1], lengths[100]], [first, last], rtol=0.03)
