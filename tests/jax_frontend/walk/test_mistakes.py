"""Bad input is a sentence at build or trace time, before anything is changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.walk_support import STACK, TX, batch, each_loss, embed, layer, mean_loss, parameters

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.jax_frontend import Layers, LayerStack, init_train_state, make_release_step, make_train_step


def run(stack=STACK, params=None, tx=TX, data=None, **options) -> None:
    params = parameters() if params is None else params
    state = init_train_state(tx, params)
    try:
        make_release_step(stack, tx, **options)(state, batch() if data is None else data)
    finally:
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_arguments() -> None:
    for name, value in (
        ("microbatches", 0),
        ("microbatches", True),
        ("max_norm", 0.0),
        ("max_norm", float("nan")),
        ("accumulation", "hold"),
        ("fence", "wall"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            make_release_step(STACK, TX, **{name: value})
    with pytest.raises(InvalidArgumentError, match="not a LayerStack"):
        make_release_step(layer, TX)
    with pytest.raises(InvalidArgumentError, match="tx=None is not an Optax transform"):
        make_release_step(STACK, None)
    for arguments, name in (
        ((None, layer, mean_loss), "embed"),
        ((embed, 3, mean_loss), "layer"),
        ((embed, {}, mean_loss), "layer"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            LayerStack(*arguments)
    with pytest.raises(InvalidArgumentError, match="batch has no arrays"):
        run(data={})
    with pytest.raises(InvalidArgumentError, match=r"microbatches=3 does not divide.*\['\w+'\].*\(8, 6\)"):
        run(microbatches=3)


def test_layers_without_a_common_axis() -> None:
    params = parameters()
    params["layers"]["bias"] = params["layers"]["bias"][:2]
    for given in ({}, {"stack": STACK}):
        with pytest.raises(InvalidArgumentError, match=r"\['layers'\]\['bias'\] has shape \(2, 6\)|common leading layer axis"):
            init_train_state(TX, params, **given)
    state = init_train_state(TX, parameters())
    with pytest.raises(InvalidArgumentError, match=r"common leading layer axis.*jnp\.stack"):
        make_release_step(STACK, TX)(state._replace(params=params), batch())
    params["layers"]["bias"] = jnp.ones(())
    with pytest.raises(InvalidArgumentError, match="stack=False"):
        init_train_state(TX, params)
    init_train_state(TX, params, stack=False)
    with pytest.raises(InvalidArgumentError, match="have no arrays"):
        init_train_state(TX, {"outer": {}, "layers": {}})


def test_parameters_of_another_form() -> None:
    with pytest.raises(InvalidArgumentError, match=r'must be a dict \{"outer": \.\.\., "layers": \.\.\.\}, but have \[\'w\'\]'):
        init_train_state(TX, {"w": jnp.ones(3)}, STACK)
    with pytest.raises(InvalidArgumentError, match=r"is None; give \{\}"):
        run(params={"outer": None, "layers": jnp.ones((3, 2))})
    several = LayerStack(embed, {"first": layer, "second": layer}, mean_loss)
    with pytest.raises(InvalidArgumentError, match=r"dict of the stacks \['first', 'second'\]"):
        init_train_state(TX, parameters(), several)
    params = parameters()
    params["layers"] = {"first": params["layers"], "second": jax.tree.map(jnp.copy, params["layers"])}
    with pytest.raises(InvalidArgumentError, match=r"init_train_state\(tx, params, stack\)"):
        run(several, params)
    params = parameters()
    params["layers"]["table"] = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(UnsupportedTensorError, match=r"params\['layers'\]\['table'\] has dtype int32"):
        run(params=params, tx=optax.sgd(1.0))


def test_a_state_of_another_kind() -> None:
    step, params = make_release_step(STACK, TX), parameters()
    with pytest.raises(InvalidArgumentError, match=r"no layer axis.*init_train_state\(tx, params, stack\)"):
        step(init_train_state(TX, params, stack=False), batch())
    deeper = init_train_state(TX, parameters(layers=4))
    with pytest.raises(InvalidArgumentError, match="another layer axis"):
        step(init_train_state(TX, params)._replace(opt_state=deeper.opt_state), batch())
    with pytest.raises(InvalidArgumentError, match="not one of this transform"):
        step(init_train_state(optax.sgd(1e-2), params), batch())
    with pytest.raises(InvalidArgumentError, match="stack=False"):
        make_train_step(STACK, TX)(init_train_state(TX, params), batch())
    with pytest.raises(InvalidArgumentError, match="stack="):
        init_train_state(TX, params, stack="yes")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda p, x: x[:, :1], r"makes float32\[8, 1, 6\] of x, which is float32\[8, 5, 6\]"),
        (lambda p, x: x.astype(jnp.bfloat16), r"makes bfloat16\[8, 5, 6\] of x.*cast or reshape"),
        (lambda p, x: (x, x), "all layers of a stack must return the structure they are given"),
    ],
)
def test_a_layer_that_changes_its_carry(changed, says) -> None:
    for save_residuals in (False, True):
        with pytest.raises(InvalidArgumentError, match=says):
            run(LayerStack(embed, changed, mean_loss), save_residuals=save_residuals)


def test_what_layers_take_and_give() -> None:
    counted = LayerStack(lambda o, b: {"x": embed(o, b), "n": 0}, lambda p, x: x, lambda o, x, b: mean_loss(o, x["x"], b))
    with pytest.raises(InvalidArgumentError, match=r"x\['n'\].*dtype int.*context or inputs"):
        run(counted)
    with pytest.raises(InvalidArgumentError, match=r"must return a tuple \(x, auxiliary\)"):
        run(LayerStack(embed, Layers(layer, auxiliary=True), mean_loss))
    with pytest.raises(InvalidArgumentError, match="auxiliary output must be floating-point"):
        run(LayerStack(embed, Layers(lambda p, x: (layer(p, x), 1), auxiliary=True), mean_loss))
    with pytest.raises(InvalidArgumentError, match=r"inputs\(batch\)\['\w+'\] has shape \(8, 6\).*3 layers.*context"):
        run(LayerStack(embed, Layers(lambda p, x, i: x, inputs=lambda batch: batch), mean_loss))


def test_losses_that_are_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape \(8, 5\); it must return a scalar"):
        run(LayerStack(embed, layer, each_loss))
    with pytest.raises(InvalidArgumentError, match="dtype int32"):
        run(LayerStack(embed, layer, lambda o, x, b: jnp.sum(b["mask"])))


def test_transforms_that_are_not_separable() -> None:
    with pytest.raises(RefusedError, match="max_norm"):
        run(tx=optax.chain(optax.clip_by_global_norm(1.0), TX))
    with pytest.raises(RefusedError, match="last"):
        run(params=parameters("bfloat16"), tx=optax.chain(TX, optax.scale(0.5)))
