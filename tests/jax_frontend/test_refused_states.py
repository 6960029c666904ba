"""A transform refuses gradients, parameters and states that do not belong together, and names what does not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.jax_frontend import adamw, make_update, stable_adamw

TX = adamw(1e-2)
PARAMS = {"w": jnp.ones((3, 2))}


def test_trees_of_different_structures_are_named() -> None:
    other = {"v": jnp.ones((3, 2))}
    with pytest.raises(InvalidArgumentError, match=r"the gradients have the structure .*'v'.*, and the parameters .*'w'"):
        TX.update(other, TX.init(PARAMS), PARAMS)
    with pytest.raises(InvalidArgumentError, match=r"the gradients have the structure .*'w'.*, and the optimizer state .*'v'"):
        TX.update(PARAMS, TX.init(other), PARAMS)


@pytest.mark.parametrize(
    ("before", "after"),
    [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
@pytest.mark.parametrize("transform", [adamw, stable_adamw])
def test_parameters_that_are_cast_after_init_are_refused(transform: Any, before: str, after: str) -> None:
    """Their compensation would be read in another dtype, or lost."""
    tx = transform(1e-2)
    state = tx.init({"a": jnp.ones(3, before)})
    params, grads = ({"a": jnp.ones(3, after)} for _ in range(2))
    for update in (tx.update, make_update(tx)):
        with pytest.raises(InvalidArgumentError, match=rf"params\['a'\] has dtype {after}.* cast after init.*Cast them first"):
            update(grads, state, params)
    assert not grads["a"].is_deleted()
    make_update(tx)(grads, tx.init(params), params)


@pytest.mark.parametrize("state", [None, {}, optax.sgd(1e-2), optax.adamw(1e-2), "the parameters"])
def test_an_optimizer_state_of_another_transform_is_named_by_its_type(state: Any) -> None:
    params = {"a": jnp.ones(3)}
    if isinstance(state, optax.GradientTransformation):
        state = state.init(params)
    state = params if state == "the parameters" else state
    with pytest.raises(InvalidArgumentError, match=rf"state is a {type(state).__name__}, and adamw needs a RuleState"):
        adamw(1e-2).update(params, state, params)


CODINGS: list[dict[str, Any]] = [{}, {"mu_dtype": "8bit"}, {"mu_dtype": "8bit", "nu_dtype": "8bit"}, {"nu_dtype": "bfloat16"}]


@pytest.mark.parametrize("here", CODINGS, ids=str)
@pytest.mark.parametrize("there", CODINGS, ids=str)
def test_a_state_of_another_coding_is_refused_before_it_is_donated(there: dict[str, Any], here: dict[str, Any]) -> None:
    """A checkpoint, which would go on in its own coding, whatever the transform says."""
    params, tx = {"w": jnp.ones((32, 256)), "small": jnp.ones(3)}, adamw(1e-2, **here)
    state = adamw(1e-2, **there).init(params)
    for update in (tx.update, make_update(tx)):
        if there == here:
            update(jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state), jax.tree.map(jnp.copy, params))
            continue
        with pytest.raises(
            InvalidArgumentError, match=r"exp_avg.* of params\['\w+'\] is .* in its state, .* with another .u_dtype"
        ):
            update(params, state, params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


def test_codes_and_scales_that_were_cast_are_refused_before_they_are_donated() -> None:
    """By a cast of all floating-point leaves: scales in bfloat16 would change every number of their blocks."""
    params, tx = {"w": jnp.ones((32, 256))}, adamw(1e-2, precision="compact")
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tx.init(params))
    for update in (tx.update, make_update(tx)):
        with pytest.raises(InvalidArgumentError, match=r"exp_avg of params\['w'\] has int8 codes and bfloat16 scales .* cast"):
            update(params, state, params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
