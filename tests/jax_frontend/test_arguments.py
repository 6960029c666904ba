"""Arguments of the transforms: what is refused, with the argument's name, and the dtypes that are kept."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import TRANSFORMS, float64
from tests.support.rules import ADAM_FAMILY

from penstock.core.errors import InvalidArgumentError, UnsupportedTensorError
from penstock.jax_frontend import adam, adamw, compensated, lion, scale_by_stable_adam, sgd, stable_adamw


@pytest.mark.parametrize("rule", ADAM_FAMILY)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", "fast"),
        ("b1", 1.0),
        ("b1", -0.1),
        ("b2", 1.5),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("inf")),
    ],
)
def test_a_value_out_of_range_is_named_as_it_was_typed(rule, argument, value) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{argument}={value!r}.*\b(in)\b"):
        TRANSFORMS[rule](**{"learning_rate": 1e-3, argument: value})


def schedule(count):
    return 1e-3


def updated(tx, params):
    return tx.update(params, tx.init(params), params)


def float64_state(tx):
    with float64():
        return tx.init(jnp.ones((64, 128)))


DECOUPLED = {"weight_decay": 1e-5, "decouple_lr": True}
ONES, W = jnp.ones(3), {"w": jnp.ones(3)}
REFUSED = {
    "not a mu_dtype": (lambda: adamw(1e-3, mu_dtype="nonsense"), "mu_dtype='nonsense' is not a dtype"),
    "a mu_dtype that numpy takes for a format": (lambda: adamw(1e-3, mu_dtype="8-bit"), "mu_dtype='8-bit' is not a dtype"),
    "not a nu_dtype": (lambda: adamw(1e-3, nu_dtype="nonsense"), "nu_dtype='nonsense' is not a dtype"),
    "mu_dtype=int32": (lambda: adamw(1e-3, mu_dtype="int32"), "mu_dtype=int32"),
    "nu_dtype=int32": (lambda: adamw(1e-3, nu_dtype="int32"), "nu_dtype=int32"),
    "a low float16 nu": (lambda: adamw(1e-3, b2=0.999, nu_dtype="float16"), "nu_dtype=float16 is too low"),
    "a momentum that is not there": (
        lambda: sgd(1e-2, mu_dtype="8bit"),
        "mu_dtype='8bit' is not possible for sgd, which keeps",
    ),
    "8 bits of float64": (
        lambda: float64_state(adamw(1e-3, nu_dtype="8bit")),
        "nu_dtype='8bit' is not possible for a float64 parameter",
    ),
    **{
        f"three {argument}": (
            lambda a=argument: stable_adamw(**{"learning_rate": 1e-3, a: ONES}),
            rf"{argument} has shape \(3,\)",
        )
        for argument in ("learning_rate", "b1", "eps", "weight_decay", "max_lr")
    },
    **{
        f"{argument} in {dtype}": (
            lambda a=argument, d=dtype: adamw(1e-3, **{a: jnp.asarray(0.5, d)}),
            rf"{argument} is a {dtype} array.*hyperparam_dtype=jnp\.float32",
        )
        for argument in ("b1", "b2", "eps")
        for dtype in ("bfloat16", "float16")
    },
    "a schedule of three": (lambda: updated(stable_adamw(lambda count: ONES), ONES), r"learning_rate has shape \(3,\)"),
    "a negative schedule": (lambda: updated(adamw(lambda count: -1.0), ONES), r"learning_rate=-1\.0"),
    "a schedule without max_lr": (
        lambda: stable_adamw(schedule, **DECOUPLED),
        "max_lr=None is not possible with decouple_lr=True",
    ),
    "an array without max_lr": (lambda: stable_adamw(jnp.asarray(1e-3), **DECOUPLED), "max_lr=None is not possible"),
    "a rate of zero as max_lr": (lambda: stable_adamw(0.0, **DECOUPLED), "max_lr=0"),
    "decoupled L2": (lambda: adam(1e-3, decouple_lr=True), r"decouple_lr=True.*use adamw"),
    "a number in a mask": (lambda: updated(adamw(1e-3, mask={"w": 1.0}), W), r"mask has 1\.0 as a leaf"),
    "a number in a mask of the direction": (
        lambda: updated(scale_by_stable_adam(weight_decay=0.1, mask={"w": 1.0}), W),
        r"mask has 1\.0 as a leaf",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_argument_that_is_not_possible_is_named(case) -> None:
    call, said = REFUSED[case]
    with pytest.raises(InvalidArgumentError, match=said):
        call()


@pytest.mark.parametrize(
    ("transform", "argument", "remedy"),
    [
        (lion, "nu_dtype", ""),
        (adamw, "state_dtype", "; write mu_dtype= and nu_dtype=."),
        (adamw, "betas", "; write b1= and b2=."),
        (adamw, "eps_root", "; leave it out: eps is added to the root of the second moment."),
    ],
)
def test_an_argument_that_the_rule_does_not_have_is_refused_by_name(transform: Any, argument: str, remedy: str) -> None:
    said = f"{transform.__name__}() got an unexpected keyword argument '{argument}'{remedy}"
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        transform(1e-3, **{argument: 1})


def test_the_nearest_possible_arguments_are_accepted() -> None:
    state = adamw(1e-3, mu_dtype=jnp.float32, nu_dtype=jnp.float32).init(jnp.ones(2, jnp.bfloat16))
    assert (state.fields["exp_avg"].dtype, state.fields["exp_avg_sq"].dtype) == (jnp.float32, jnp.float32)
    stable_adamw(1e-3, b2=0.99, nu_dtype="bfloat16")
    stable_adamw(schedule, **DECOUPLED, max_lr=1e-3)
    by_default = stable_adamw(1e-2, weight_decay=5e-4, decouple_lr=True)  # max_lr is the learning rate
    updates, _ = by_default.update(jnp.zeros(2), by_default.init(jnp.ones(2)), jnp.ones(2))
    assert jnp.allclose(updates, -5e-4, rtol=1e-6)


@pytest.mark.parametrize(
    ("b2", "parameter", "second"),
    [
        (0.99, "bfloat16", "bfloat16"),
        (0.999, "bfloat16", "float32"),
        (0.9, "float16", "float32"),
        (jnp.asarray(0.9), "bfloat16", "float32"),
        (0.999, "float32", "float32"),
    ],
)
def test_the_default_dtype_of_the_second_moment_can_decay(b2, parameter, second) -> None:
    state = stable_adamw(1e-3, b2=b2).init(jnp.ones(2, parameter))
    assert (state.fields["exp_avg"].dtype, state.fields["exp_avg_sq"].dtype) == (jnp.dtype(parameter), jnp.dtype(second))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_injected_numbers_in_low_precision_are_refused(dtype) -> None:
    params = jnp.ones(3, dtype)
    with pytest.raises(InvalidArgumentError, match="hyperparam_dtype"):
        optax.inject_hyperparams(adamw)(1e-3).init(params)
    tx = optax.inject_hyperparams(adamw, hyperparam_dtype=jnp.float32)(1e-3, compensation="none")
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(np.asarray(updates, np.float32), -1e-3, rtol=0.02)


@pytest.mark.parametrize("with_params", [True, False])
def test_gradients_of_other_dtypes_or_shapes_are_refused(with_params) -> None:
    params = {"a": [jnp.ones(3), jnp.ones(1)]}
    tx = adamw(1e-3, weight_decay=0.0)
    given = params if with_params else None
    for dtype in ("complex64", "int32", "bool"):
        with pytest.raises(UnsupportedTensorError, match=rf"gradient of params\['a'\]\[0\] has dtype {dtype}"):
            tx.update({"a": [jnp.ones(3, dtype), jnp.ones(1)]}, tx.init(params), given)
    with pytest.raises(InvalidArgumentError, match=r"params\['a'\]\[0\] has shape \(1,\)"):
        tx.update({"a": [jnp.ones(1), jnp.ones(1)]}, tx.init(params), given)
    with pytest.raises(InvalidArgumentError, match=r"params\['a'\]\[1\] has shape \(5,\)"):
        tx.update({"a": [jnp.ones(3), jnp.ones(5)]}, tx.init(params), given)


def test_high_fully_decoupled_decay_warns_once() -> None:
    for optimizer in (stable_adamw, adamw):
        with pytest.warns(UserWarning, match=r"weight_decay=0.01.*decouple_lr=True") as caught:
            tx = optimizer(1e-3, weight_decay=1e-2, decouple_lr=True)
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))  # a warning here would be an error
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stable_adamw(1e-3, weight_decay=9e-4, decouple_lr=True)
        optax.inject_hyperparams(stable_adamw)(1e-3, decouple_lr=True, max_lr=1e-3).init(jnp.ones(2))


@pytest.mark.parametrize("rule", TRANSFORMS)
@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_parameters_of_other_dtypes_are_refused(rule, dtype) -> None:
    with pytest.raises(UnsupportedTensorError, match=rf"params\['a'\]\[1\] has dtype {dtype}"):
        TRANSFORMS[rule](1e-3).init({"a": [jnp.ones(2), jnp.ones(2, dtype)]})


@pytest.mark.parametrize("rule", TRANSFORMS)
def test_an_update_without_params_is_refused_where_it_needs_them(rule) -> None:
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.5)}
    with pytest.raises(InvalidArgumentError, match=f"{rule} needs the parameters for weight_decay"):
        TRANSFORMS[rule](1e-3, weight_decay=0.1).update(grads, TRANSFORMS[rule](1e-3).init(params))
    with pytest.raises(InvalidArgumentError, match="needs the parameters for weight_decay"):
        TRANSFORMS[rule](1e-3, weight_decay=lambda count: 0.0).update(grads, TRANSFORMS[rule](1e-3).init(params))
    low = jnp.ones(3, jnp.bfloat16)
    tx = TRANSFORMS[rule](1e-3, weight_decay=0.0)
    with pytest.raises(InvalidArgumentError, match="needs the parameters for compensation='auto'"):
        tx.update(low, tx.init(low))
    without, _ = tx.update(grads, tx.init(params))
    within, _ = tx.update(grads, tx.init(params), params)
    assert jnp.array_equal(without["w"], within["w"])


@pytest.mark.parametrize("number", [np.float32, np.float64, jnp.float64])
def test_a_float64_number_does_not_upcast_the_arithmetic(number) -> None:
    with float64():
        tx = stable_adamw(number(1e-3), eps=number(1e-6), weight_decay=number(0.1))
        for dtype in ("float32", "bfloat16"):
            params = jnp.ones(3, dtype)
            traced = jax.make_jaxpr(lambda p, s: tx.update(p, s, p))(params, tx.init(params))
            assert "f64[3]" not in str(traced)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "tx",
    [*[transform(lambda count: 1e-3) for transform in TRANSFORMS.values()], scale_by_stable_adam(),
     compensated(optax.adam(1e-3))],
)  # fmt: skip
def test_dtypes_and_shapes_are_kept(tx, dtype) -> None:
    params = {"a": jnp.ones((2, 3), dtype), "b": jnp.ones((), dtype), "c": jnp.zeros((0,), dtype)}
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (params, state))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (updates, after)) == described
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((updates, after)))
