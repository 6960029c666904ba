"""What is no state, no parameters, no loss or no norm is told by name, before anything is computed or donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.walk_support import STACK, TX, batch, parameters

from penstock.core.errors import InvalidArgument, PenstockError, UnsupportedTensor
from penstock.jax_frontend import TrainState, adamw, init_train_state, make_release_step, make_train_step, release_layers

PARAMS = {"w": jnp.ones((3, 2))}


def loss(params: Any, data: jax.Array) -> jax.Array:
    return jnp.mean((data @ params["w"]) ** 2)


def donated() -> Any:
    params = jax.tree.map(jnp.copy, PARAMS)
    params["w"].delete()
    return params


PARAMETERS: dict[str, tuple[Callable[[], Any], type[PenstockError], str]] = {
    "none": (lambda: None, InvalidArgument, "params have no arrays"),
    "empty": (lambda: {"w": None}, InvalidArgument, "params have no arrays"),
    "integers": (lambda: {"w": jnp.ones(2, int)}, UnsupportedTensor, r"params\['w'\] has dtype int32"),
    "a number": (lambda: {"w": 3}, UnsupportedTensor, r"params\['w'\] has dtype int32"),
    "complex": (lambda: {"w": jnp.ones(2, complex)}, UnsupportedTensor, r"params\['w'\] has dtype complex64"),
    "a key": (lambda: {"w": jax.random.key(0)}, UnsupportedTensor, r"params\['w'\] has dtype key"),
    "a word": (lambda: {"w": "x"}, UnsupportedTensor, r"params\['w'\] is str"),
    "donated": (donated, InvalidArgument, r"params\['w'\] was donated to an earlier update"),
    "outer is none": (lambda: {"outer": None, "layers": PARAMS}, InvalidArgument, r'params\["outer"\] is None; give \{\}'),
}


@pytest.mark.parametrize("tx", [adamw(1e-2), optax.sgd(1e-2)], ids=["adamw", "optax.sgd"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_what_cannot_be_trained_is_refused_before_a_state_is_made(case: str, tx: Any) -> None:
    made, error, said = PARAMETERS[case]
    with pytest.raises(error, match=said):
        init_train_state(tx, made())


STEPS: dict[str, Any] = {
    "make_train_step": make_train_step(loss, TX),
    "make_release_step": make_release_step(STACK, TX),
    "release_layers": release_layers(lambda outer, layers, data: jnp.ones(()), lambda params, x: x, TX),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_is_no_state_is_told_by_its_type(step: str) -> None:
    state = init_train_state(TX, parameters())
    for given in (None, state.params, state.opt_state, tuple(state)):
        with pytest.raises(
            InvalidArgument, match=f"state is a {type(given).__name__}, no TrainState; make it with init_train_state"
        ):
            STEPS[step](given, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "make", [lambda **a: make_train_step(loss, TX, **a), lambda **a: make_release_step(STACK, TX, **a)], ids=list(STEPS)[:2]
)
def test_a_norm_is_a_number(make: Any) -> None:
    for value in (-1, 0.0, float("nan"), "1", True, jnp.ones(2)):
        with pytest.raises(InvalidArgument, match=r"max_norm"):
            make(max_norm=value)
    make(max_norm=jnp.ones(()))


def test_a_loss_is_callable() -> None:
    with pytest.raises(InvalidArgument, match="loss_fn=None is not callable"):
        make_train_step(None, TX)  # type: ignore[arg-type]


def test_trees_that_do_not_go_together_are_shown() -> None:
    tx, other = adamw(1e-2), {"v": jnp.ones((3, 2))}
    with pytest.raises(InvalidArgument, match=r"the gradients have the structure .*'v'.*, and the parameters .*'w'"):
        tx.update(other, tx.init(PARAMS), PARAMS)
    with pytest.raises(InvalidArgument, match=r"the gradients have the structure .*'w'.*, and the optimizer state .*'v'"):
        tx.update(PARAMS, tx.init(other), PARAMS)
    for state in (None, PARAMS, optax.adam(1e-2).init(PARAMS)):
        with pytest.raises(InvalidArgument, match=f"state is a {type(state).__name__}, and adamw needs an AdamState"):
            tx.update(PARAMS, state, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not one of this transform"):
        make_train_step(loss, tx)(TrainState(PARAMS, tx.init(other)), jnp.ones((4, 3)))
