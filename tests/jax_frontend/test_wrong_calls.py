"""What is no state, no parameters, no loss or no norm, or does not belong together, is told by name, before anything is
computed or donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.walk_support import STACK, TX, batch, parameters

from penstock.core.errors import InvalidArgumentError, PenstockError, UnsupportedTensorError
from penstock.jax_frontend import (
    TrainState,
    adamw,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    release_layers,
    stable_adamw,
)

CASTS = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
PARAMS = {"w": jnp.ones((3, 2))}


def loss(params: Any, data: jax.Array) -> jax.Array:
    return jnp.mean((data @ params["w"]) ** 2)


def donated() -> Any:
    params = jax.tree.map(jnp.copy, PARAMS)
    params["w"].delete()
    return params


PARAMETERS: dict[str, tuple[Callable[[], Any], type[PenstockError], str]] = {
    "none": (lambda: None, InvalidArgumentError, "params have no arrays"),
    "empty": (lambda: {"w": None}, InvalidArgumentError, "params have no arrays"),
    "integers": (lambda: {"w": jnp.ones(2, int)}, UnsupportedTensorError, r"params\['w'\] has dtype int32"),
    "a number": (lambda: {"w": 3}, UnsupportedTensorError, r"params\['w'\] has dtype int32"),
    "complex": (lambda: {"w": jnp.ones(2, complex)}, UnsupportedTensorError, r"params\['w'\] has dtype complex64"),
    "a key": (lambda: {"w": jax.random.key(0)}, UnsupportedTensorError, r"params\['w'\] has dtype key"),
    "a word": (lambda: {"w": "x"}, UnsupportedTensorError, r"params\['w'\] is str"),
    "donated": (donated, InvalidArgumentError, r"params\['w'\] was donated to an earlier update"),
    "outer is none": (lambda: {"outer": None, "layers": PARAMS}, InvalidArgumentError, r'params\["outer"\] is None; give \{\}'),
}


@pytest.mark.parametrize("tx", [adamw(1e-2), optax.sgd(1e-2)], ids=["adamw", "optax.sgd"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_what_cannot_be_trained_is_refused_before_a_state_is_made(case: str, tx: Any) -> None:
    made, error, said = PARAMETERS[case]
    with pytest.raises(error, match=said) as raised:
        init_train_state(tx, made())
    assert (error is UnsupportedTensorError) == (
        "What the model reads and does not train goes into the batch" in str(raised.value)
    )


STEPS: dict[str, Any] = {
    "make_train_step": make_train_step(loss, TX),
    "make_release_step": make_release_step(STACK, TX),
}
if hasattr(jax, "new_ref"):
    STEPS["release_layers"] = release_layers(lambda outer, layers, data: jnp.ones(()), lambda params, x: x, TX)


@pytest.mark.parametrize("step", STEPS)
def test_what_is_no_state_is_told_by_its_type(step: str) -> None:
    state = init_train_state(TX, parameters())
    for given in (None, state.params, state.opt_state, tuple(state)):
        with pytest.raises(
            InvalidArgumentError, match=f"state is a {type(given).__name__}, no TrainState; make it with init_train_state"
        ):
            STEPS[step](given, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "make", [lambda **a: make_train_step(loss, TX, **a), lambda **a: make_release_step(STACK, TX, **a)], ids=list(STEPS)[:2]
)
def test_a_norm_is_a_number(make: Any) -> None:
    for value in (-1, 0.0, float("nan"), "1", True, jnp.ones(2)):
        with pytest.raises(InvalidArgumentError, match=r"max_norm"):
            make(max_norm=value)
    make(max_norm=jnp.ones(()))


def test_a_loss_is_callable() -> None:
    with pytest.raises(InvalidArgumentError, match="loss_fn=None is not callable"):
        make_train_step(None, TX)  # type: ignore[arg-type]


def test_trees_that_do_not_go_together_are_shown() -> None:
    tx, other = adamw(1e-2), {"v": jnp.ones((3, 2))}
    with pytest.raises(InvalidArgumentError, match=r"the gradients have the structure .*'v'.*, and the parameters .*'w'"):
        tx.update(other, tx.init(PARAMS), PARAMS)
    with pytest.raises(InvalidArgumentError, match=r"the gradients have the structure .*'w'.*, and the optimizer state .*'v'"):
        tx.update(PARAMS, tx.init(other), PARAMS)
    with pytest.raises(InvalidArgumentError, match="not one of this transform"):
        make_train_step(loss, tx)(TrainState(PARAMS, tx.init(other)), jnp.ones((4, 3)))


@pytest.mark.parametrize("transform", [adamw, stable_adamw])
@pytest.mark.parametrize(("before", "after"), CASTS)
def test_parameters_that_are_cast_after_init_are_refused(transform, before: str, after: str) -> None:
    """Their compensation would be taken for something else, or lost."""
    tx = transform(1e-2)
    state = tx.init({"a": jnp.ones(3, before)})
    params, grads = ({"a": jnp.ones(3, after)} for _ in range(2))
    for update in (tx.update, make_update(tx)):
        with pytest.raises(InvalidArgumentError, match=rf"params\['a'\] has dtype {after}.* cast after init.*Cast them first"):
            update(grads, state, params)
    assert not grads["a"].is_deleted()
    make_update(tx)(grads, tx.init(params), params)


@pytest.mark.parametrize("state", [None, {}, optax.sgd(1e-2), optax.adamw(1e-2), "the parameters"])
def test_a_state_that_is_not_the_transform_s_is_named(state) -> None:
    params = {"a": jnp.ones(3)}
    if isinstance(state, optax.GradientTransformation):
        state = state.init(params)
    state = params if state == "the parameters" else state
    with pytest.raises(InvalidArgumentError, match=rf"state is a {type(state).__name__}, and adamw needs an AdamState"):
        adamw(1e-2).update(params, state, params)


def test_init_takes_the_transform_first() -> None:
    with pytest.raises(InvalidArgumentError, match="is not an Optax transform"):
        init_train_state({"a": jnp.ones(3)}, adamw(1e-2))
