"""States and parameters that do not belong together: an error says so, before anything is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from penstock.core.errors import InvalidArgument
from penstock.jax_frontend import (
    LayerStack,
    adamw,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    release_layers,
    stable_adamw,
)

CASTS = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")]


@pytest.mark.parametrize("transform", [adamw, stable_adamw])
@pytest.mark.parametrize(("before", "after"), CASTS)
def test_parameters_that_are_cast_after_init_are_refused(transform, before: str, after: str) -> None:
    """Their compensation would be taken for something else, or lost."""
    tx = transform(1e-2)
    state = tx.init({"a": jnp.ones(3, before)})
    params, grads = ({"a": jnp.ones(3, after)} for _ in range(2))
    for update in (tx.update, make_update(tx)):
        with pytest.raises(InvalidArgument, match=rf"params\['a'\] has dtype {after}.* cast after init.*Cast them first"):
            update(grads, state, params)
    assert not grads["a"].is_deleted()
    make_update(tx)(grads, tx.init(params), params)


@pytest.mark.parametrize("state", [None, {}, optax.sgd(1e-2), optax.adamw(1e-2), "the parameters"])
def test_a_state_that_is_not_the_transform_s_is_named(state) -> None:
    params = {"a": jnp.ones(3)}
    if isinstance(state, optax.GradientTransformation):
        state = state.init(params)
    state = params if state == "the parameters" else state
    with pytest.raises(InvalidArgument, match=rf"state is a {type(state).__name__}, and adamw needs an AdamState"):
        adamw(1e-2).update(params, state, params)


def test_a_step_takes_a_train_state() -> None:
    tx = adamw(1e-2)
    params = {"outer": jnp.ones(3), "layers": jnp.ones((2, 3))}
    stack = LayerStack(lambda outer, batch: outer * batch, lambda layer, x: layer * x, lambda outer, x, batch: jnp.sum(x))

    def loss(outer, layers, batch):
        return jnp.sum(jax.lax.scan(lambda x, i: (layers(i, x), None), outer * batch, layers.indices)[0])

    steps = [make_train_step(lambda params, batch: jnp.sum(params["outer"]), tx), make_release_step(stack, tx)]
    if hasattr(jax, "new_ref"):
        steps.append(release_layers(loss, stack.layer, tx))
    for step in steps:
        for state in (params, (params, tx.init(params))):
            with pytest.raises(InvalidArgument, match=f"state is a {type(state).__name__}, no TrainState; make it with init_"):
                step(state, jnp.ones(()))
    assert not params["outer"].is_deleted()


def test_init_takes_the_transform_first() -> None:
    with pytest.raises(InvalidArgument, match="is not an Optax transform"):
        init_train_state({"a": jnp.ones(3)}, adamw(1e-2))
