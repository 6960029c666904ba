"""Wrong calls of the steps raise an error that names what was wrong and the remedy, before anything is computed or donated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tests.support.jax_walk import MASKED, STACK, TX, batch, each_loss, embed, layer, mean_loss, parameters

from penstock.core.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    RefusedError,
    UnsupportedTensorError,
)
from penstock.jax_frontend import (
    Layers,
    LayerStack,
    TrainState,
    WeightedMean,
    adamw,
    dynamic_loss_scale,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    release_layers,
    scale_by_stable_adam,
    stable_adamw,
)

PARAMS = {"w": jnp.ones((3, 2))}
SGD = optax.sgd(1e-2)
CHAINED = optax.chain(TX, optax.scale(0.5))

Row = tuple[Any, ...]
"""(call, text of the error[, its type; InvalidArgumentError])"""
needs_references = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no jax.new_ref")


def loss(params: Any, data: Any) -> jax.Array:
    return jnp.mean((data["x"] @ params["w"]) ** 2)


def rows() -> dict[str, jax.Array]:
    return {"x": jnp.ones((8, 3)), "mask": jnp.ones(8, bool)}


def own_loop(outer: Any, layers: Any, data: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, index: (layers(index, x), None), embed(outer, data), layers.indices)
    return mean_loss(outer, x, data)


def run(step: Any, state: Any, data: Any) -> None:
    """Call a step, and require that a refused one has left its state alive."""
    try:
        step(state, data)
    finally:
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, data)) if isinstance(leaf, jax.Array))


def train(loss_fn: Any = loss, tx: Any = TX, params: Any = PARAMS, data: Any = None, state: Any = None, **options: Any) -> Any:
    step = make_train_step(loss_fn, tx, **options)
    run(step, init_train_state(tx, params, layered=False) if state is None else state, rows() if data is None else data)


def release(
    stack: Any = STACK, tx: Any = TX, params: Any = None, data: Any = None, state: Any = None, scale: Any = None, **options: Any
) -> None:
    step = make_release_step(stack, tx, **options)
    if state is None:
        state = init_train_state(tx, parameters() if params is None else params, loss_scale=scale)
    run(step, state, batch() if data is None else data)


def in_state(stack: Any = STACK, tx: Any = TX, scale: Any = None, **options: Any) -> None:
    release(stack, tx, scale=scale, microbatches=2, accumulation="state", **options)


def loop(loss_fn: Any = own_loop, tx: Any = TX, state: Any = None) -> None:
    run(release_layers(loss_fn, layer, tx), init_train_state(tx, parameters()) if state is None else state, batch())


def changed(**layers: Any) -> dict[str, Any]:
    """The parameters of STACK with other leaves in the layers."""
    params = parameters()
    return {**params, "layers": {**params["layers"], **layers}}


def donated() -> dict[str, jax.Array]:
    params = jax.tree.map(jnp.copy, PARAMS)
    params["w"].delete()
    return params


def loss_with_auxiliary(outer: Any, x: Any, data: Any, auxiliary: Any) -> Any:
    return mean_loss(outer, x, data) + jnp.mean(auxiliary)


TWO_STACKS = LayerStack(embed, {"first": layer, "second": layer}, mean_loss)

MAKERS: dict[str, Row] = {
    **{
        f"{maker} max_norm={value!r}": (lambda make=make, value=value: make(max_norm=value), "max_norm")
        for maker, make in (
            ("make_train_step", lambda **given: make_train_step(loss, TX, **given)),
            ("make_release_step", lambda **given: make_release_step(STACK, TX, **given)),
        )
        for value in (-1, 0.0, float("nan"), "1", True, (1, 1))
    },
    **{
        f"microbatches={value!r}": (lambda value=value: make_train_step(loss, TX, microbatches=value), "microbatches")
        for value in (0, -1, 1.5, True, "two")
    },
    **{
        f"whole={value!r}": (lambda value=value: make_train_step(loss, TX, microbatches=2, whole=value), "whole")
        for value in ("mask", None, (1,))
    },
    **{
        f"clip_passes={value!r}": (
            lambda value=value: make_train_step(loss, TX, max_norm=1.0, clip_passes=value),
            "clip_passes",
        )
        for value in (0, 3, True, "two")
    },
    **{
        f"{name}={value!r}": (lambda name=name, value=value: make_release_step(STACK, TX, **{name: value}), name)
        for name, value in (("microbatches", 0), ("microbatches", True), ("accumulation", "hold"), ("fence", "wall"))
    },
    "two passes of micro-batches": (
        lambda: make_train_step(loss, TX, microbatches=4, max_norm=1.0, clip_passes=2),
        r"clip_passes=2 with microbatches=4.*make_release_step",
    ),
    "no loss": (lambda: make_train_step(None, TX), "loss_fn=None is not callable"),  # type: ignore[arg-type]
    "no stack": (lambda: make_release_step(layer, TX), "stack is a function, not a LayerStack"),  # type: ignore[arg-type]
    "no embed": (lambda: LayerStack(None, layer, mean_loss), "embed"),  # type: ignore[arg-type]
    "no layer": (lambda: LayerStack(embed, 3, mean_loss), "layer"),  # type: ignore[arg-type]
    "no stacks": (lambda: LayerStack(embed, {}, mean_loss), "layer"),
    "a loss of a batch": (lambda: make_train_step(lambda batch: batch, TX), r"called with \(params, batch\).*takes \(batch\)"),
    "an embed of a batch": (
        lambda: LayerStack(lambda batch: batch, layer, mean_loss),
        r"embed is called with \(outer, batch\)",
    ),
    "a layer without context": (
        lambda: LayerStack(embed, {"first": Layers(layer, context=mean_loss)}, mean_loss),
        r"layer\['first'\] is called with \(layer_params, x, context\)",
    ),
    "a loss without auxiliary outputs": (
        lambda: LayerStack(embed, Layers(layer, auxiliary=True), mean_loss),
        r"loss is called with \(outer, x, batch, auxiliary\)",
    ),
    "max_norm in state": (lambda: in_state(max_norm=1.0), r"norm of the whole gradient.*leave accumulation out", RefusedError),
    **{
        f"{name} in state": (
            lambda tx=tx: in_state(tx=tx),
            r"only possible for penstock's own transforms.*leave accumulation out",
            RefusedError,
        )
        for name, tx in {
            "a chain": optax.chain(optax.zero_nans(), TX),
            "optax.adamw": optax.adamw(1e-2),
            "an injected transform": optax.inject_hyperparams(stable_adamw)(1e-2),
            "a direction": scale_by_stable_adam(),
        }.items()
    },
    **{
        f"{maker} of {name}": (lambda make=make, wrong=wrong: make(wrong), r"tx is a \w+, not an Optax transform")
        for maker, make in {
            "make_train_step": lambda tx: make_train_step(loss, tx),
            "make_release_step": lambda tx: make_release_step(STACK, tx),
            "make_update": make_update,
            "init_train_state": lambda tx: init_train_state(tx, PARAMS),
        }.items()
        for name, wrong in {"None": None, "a function": adamw}.items()
    },
    "parameters before the transform": (lambda: init_train_state(PARAMS, TX), "tx is a dict, not an Optax transform"),
    "stack": (lambda: init_train_state(TX, parameters(), stack="yes"), "stack='yes' is not a LayerStack"),
    "layered": (lambda: init_train_state(TX, parameters(), layered="yes"), "layered='yes' is not possible"),
    "stack and layered": (
        lambda: init_train_state(TX, parameters(), stack=STACK, layered=False),
        "layered=False does not go with stack=",
    ),
    **{
        f"loss_scale={value!r}": (lambda value=value: init_train_state(TX, PARAMS, loss_scale=value), "loss_scale")
        for value in (0.0, "big", True)
    },
    "initial too low": (lambda: dynamic_loss_scale(0.5), "initial"),
    "initial infinite": (lambda: dynamic_loss_scale(float("inf")), "initial"),
    "period": (lambda: dynamic_loss_scale(period=0), "period"),
    "factor": (lambda: dynamic_loss_scale(factor=1.0), "factor"),
}

PARAMETERS: dict[str, Row] = {
    **{
        name: (lambda made=made: init_train_state(TX, made()), *said)
        for name, (made, *said) in {
            "none": (lambda: None, "params have no arrays"),
            "empty": (lambda: {"w": None}, "params have no arrays"),
            "no layers": (lambda: {"outer": {}, "layers": {}}, "have no arrays"),
            "donated": (donated, r"params\['w'\] was donated to an earlier update"),
            "outer is none": (lambda: {"outer": None, "layers": PARAMS}, r'params\["outer"\] is None; give \{\}'),
            "unequal layers": (lambda: changed(bias=jnp.ones((2, 6))), r"common leading layer axis.*jnp\.stack.*layered=False"),
            "a layer without an axis": (lambda: changed(bias=jnp.ones(())), "common leading layer axis"),
            "an integer table in the layers": (
                lambda: changed(table=jnp.zeros((3, 2), jnp.int32)),
                r"params\['layers'\]\['table'\] has dtype int32",
                UnsupportedTensorError,
            ),
        }.items()
    },
    "unequal layers of a stack": (
        lambda: init_train_state(TX, changed(bias=jnp.ones((2, 6))), stack=STACK),
        r"\['bias'\] \(2, 6\); all need a common leading layer axis",
    ),
    "not of a stack": (
        lambda: init_train_state(TX, PARAMS, stack=STACK),
        r'must be a dict \{"outer": \.\.\., "layers": \.\.\.\}, but have \[\'w\'\]',
    ),
    "not layered": (lambda: init_train_state(TX, PARAMS, layered=True), "must be a dict"),
    "not of several stacks": (
        lambda: init_train_state(TX, parameters(), stack=TWO_STACKS),
        r"dict of the stacks \['first', 'second'\]",
    ),
}

STATES: dict[str, Row] = {
    "of several stacks without a name": (
        lambda: release(TWO_STACKS, params={**parameters(), "layers": {"first": jnp.ones((3, 2)), "second": jnp.ones((3, 2))}}),
        r"init_train_state\(tx, params, stack=stack\)",
    ),
    "without a layer axis": (
        lambda: release(state=init_train_state(TX, parameters(), layered=False)),
        r"no layer axis.*init_train_state\(tx, params, stack=stack\)",
    ),
    "of more layers": (
        lambda: release(
            state=init_train_state(TX, parameters())._replace(opt_state=init_train_state(TX, parameters(layers=4)).opt_state)
        ),
        "another layer axis",
    ),
    "of other layers": (
        lambda: release(state=init_train_state(TX, parameters())._replace(params=changed(bias=jnp.ones((2, 6))))),
        r"common leading layer axis.*jnp\.stack",
    ),
    "of another transform": (lambda: release(state=init_train_state(SGD, parameters())), "not one of this transform"),
    "of another transform, unrolled": (
        lambda: train(tx=SGD, state=init_train_state(TX, PARAMS)),
        r"not one of this transform.*init_train_state",
    ),
    "of other parameters": (lambda: train(state=TrainState(PARAMS, TX.init({"v": PARAMS["w"]}))), "of this transform"),
    "of another precision": (
        lambda: train(
            tx=adamw(1e-3, mu_dtype="8bit"), state=init_train_state(adamw(1e-3), {"w": jnp.ones((32, 256))}, layered=False)
        ),
        r"opt_state.fields\['exp_avg'\]\['w'\] is float32, and tx.init makes EightBit; give the transform the precision",
    ),
    "layered, unrolled": (lambda: train(state=init_train_state(TX, parameters())), "layered=False"),
    "with a loss scale, unrolled": (lambda: train(state=init_train_state(TX, PARAMS, loss_scale=2.0)), "leave loss_scale out"),
    "with a loss scale, in state": (lambda: in_state(scale=8.0), "overflow of a later one", RefusedError),
}

BATCHES: dict[str, Row] = {
    "empty": (lambda: release(data={}), "batch has no arrays"),
    "not divisible": (lambda: release(microbatches=3), r"microbatches=3 does not divide.*\['\w+'\].*\(8, 6\)"),
    "key of words": (
        lambda: release(data={**batch(), "key": jax.random.PRNGKey(0)}, microbatches=4),
        r"\['key'\].*split into one for each micro-batch if jax\.random\.key made it",
    ),
    "not divisible, unrolled": (lambda: train(microbatches=3), r"microbatches=3 does not divide.*\['\w+'\].*\(8"),
    "not divisible, a single array": (
        lambda: train(data=jnp.ones((8, 3)), microbatches=3),
        r"leading axis of batch, which.*multiple of microbatches\.(\n|$)",
    ),
    "of unequal rows": (
        lambda: train(data={**rows(), "mask": jnp.ones(4, bool)}, microbatches=2),
        r"\['mask'\] 4; split into microbatches=2.*belong together.*whole=\('mask',\)",
    ),
    "of a row for each micro-batch": (
        lambda: train(data={**rows(), "mask": jnp.ones(4, bool)}, microbatches=4),
        r"\['x'\] has 8 rows and batch\['mask'\] 4; split into microbatches=4.*belong together",
    ),
    "of a row for each micro-batch, in the walk": (
        lambda: release(data={**batch(), "mask": jnp.ones(4, bool)}, microbatches=4),
        r"\['mask'\] 4.*whole=\('mask',\)",
    ),
    "without what is whole": (
        lambda: train(microbatches=2, whole=("masks",)),
        "'masks'; the batch has",
    ),
}

MODELS: dict[str, Row] = {
    **{
        f"{name}, {saved=}": (
            lambda wrong=wrong, saved=saved: release(LayerStack(embed, wrong, mean_loss), save_residuals=saved),
            said,
        )
        for name, (wrong, said) in {
            "another shape": (lambda p, x: x[:, :1], r"makes float32\[8, 1, 6\] of x, which is float32\[8, 5, 6\]"),
            "another dtype": (lambda p, x: x.astype(jnp.bfloat16), r"makes bfloat16\[8, 5, 6\] of x.*cast or reshape"),
            "another structure": (lambda p, x: (x, x), "all layers of a stack must return the structure they are given"),
        }.items()
        for saved in (False, True)
    },
    "an integer in x": (
        lambda: release(
            LayerStack(lambda o, b: {"x": embed(o, b), "n": 0}, lambda p, x: x, lambda o, x, b: mean_loss(o, x["x"], b))
        ),
        r"x\['n'\].*dtype int.*context or inputs",
    ),
    "no auxiliary": (
        lambda: release(LayerStack(embed, Layers(layer, auxiliary=True), loss_with_auxiliary)),
        r"must return a tuple \(x, auxiliary\)",
    ),
    "an integer as auxiliary": (
        lambda: release(LayerStack(embed, Layers(lambda p, x: (layer(p, x), 1), auxiliary=True), loss_with_auxiliary)),
        "auxiliary output must be floating-point",
    ),
    "inputs without layers": (
        lambda: release(LayerStack(embed, Layers(lambda p, x, i: x, inputs=lambda batch: batch), mean_loss)),
        r"inputs\(batch\)\['\w+'\] has shape \(8, 6\).*3 layers.*context",
    ),
    "a loss of each row": (
        lambda: release(LayerStack(embed, layer, each_loss)),
        r"shape \(8, 5\) as the loss; it must return a scalar",
    ),
    "an integer loss": (lambda: release(LayerStack(embed, layer, lambda o, x, b: jnp.sum(b["mask"]))), "dtype int32"),
    "a dict as loss": (lambda: train(lambda p, b: {"loss": loss(p, b)}), "must return a scalar"),
    "three numbers as loss": (lambda: train(lambda p, b: [loss(p, b), 1, 2]), "must return a scalar"),
    **{
        f"a tuple as loss, {name}": (call, r"shape \(\(\), \(\)\).*has_aux=True.*WeightedMean\(sum, weight\)")
        for name, call in {
            "unrolled": lambda: train(lambda p, b: (loss(p, b), jnp.ones(()))),
            "in the walk": lambda: release(LayerStack(embed, layer, lambda *given: (mean_loss(*given), 0.5))),
        }.items()
    },
    "no aux": (lambda: train(has_aux=True), r"has_aux=True the loss function must return a tuple \(loss, aux\)"),
    "a weight in state": (lambda: in_state(MASKED), r"weight of the whole batch.*return the mean", RefusedError),
    "a global norm": (lambda: release(tx=optax.chain(optax.clip_by_global_norm(1.0), TX)), "max_norm", RefusedError),
    "a transform after a compensated one": (lambda: release(tx=CHAINED, params=parameters("bfloat16")), "last", RefusedError),
    "a transform after a compensated one, unrolled": (
        lambda: train(tx=CHAINED, params={"w": jnp.ones((3, 2), jnp.bfloat16)}),
        "last",
        RefusedError,
    ),
}

LOOPS: dict[str, Row] = {
    "a tuple as loss": (
        lambda: loop(lambda *given: (own_loop(*given), jnp.ones(()))),
        r"shape \(\(\), \(\)\).*has_aux=True.*WeightedMean\(sum, weight\)",
    ),
    "no loss": (lambda: release_layers(None, layer, TX), "loss_fn=None is not callable"),  # type: ignore[arg-type]
    "the layer first": (
        lambda: release_layers(layer, own_loop, TX),  # type: ignore[arg-type]
        r"loss_fn is called with \(outer, layers, batch\)",
    ),
    "fence": (lambda: release_layers(own_loop, layer, TX, fence="wall"), "fence"),
    "no transform": (lambda: release_layers(own_loop, layer, adamw), "not an Optax transform"),  # type: ignore[arg-type]
    "a float index": (
        lambda: loop(lambda outer, layers, data: jnp.mean(layers(0.0, embed(outer, data)))),
        r"index of shape \(\) and dtype float32",
    ),
    "several indices": (
        lambda: loop(lambda outer, layers, data: jnp.mean(layers(layers.indices, embed(outer, data)))),
        r"index of shape \(3,\)",
    ),
    "a loss of each row": (lambda: loop(lambda outer, layers, data: embed(outer, data)), "must return a scalar"),
    "a weight": (lambda: loop(lambda *given: WeightedMean(own_loop(*given), jnp.ones(()))), "divide by the weight"),
    "a state without a layer axis": (lambda: loop(state=init_train_state(TX, parameters(), layered=False)), "init_train_state"),
    "a state of another transform": (lambda: loop(state=init_train_state(SGD, parameters())), "not one of this transform"),
    "a global norm": (lambda: loop(tx=optax.chain(optax.clip_by_global_norm(1.0), TX)), "max_norm=", RefusedError),
}


def check(row: Row) -> None:
    call, said, *error = row
    with pytest.raises(error[0] if error else InvalidArgumentError, match=said):
        call()


@pytest.mark.parametrize("case", MAKERS)
def test_a_wrong_argument_is_refused_when_it_is_given(case: str) -> None:
    check(MAKERS[case])


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_that_do_not_fit_are_refused_before_a_state_is_made(case: str) -> None:
    check(PARAMETERS[case])


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_kind_is_refused(case: str) -> None:
    check(STATES[case])


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_split_is_refused(case: str) -> None:
    check(BATCHES[case])


@pytest.mark.parametrize("case", MODELS)
def test_a_model_or_transform_that_cannot_be_trained_is_refused(case: str) -> None:
    check(MODELS[case])


@needs_references
@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_that_cannot_be_released_is_refused(case: str) -> None:
    check(LOOPS[case])


def test_a_jax_without_references_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(jax, "new_ref", raising=False)
    with pytest.raises(MissingDependencyError, match=r"jax\.new_ref.*make_release_step"):
        release_layers(own_loop, layer, TX)


def test_the_nearest_valid_calls_are_accepted() -> None:
    for make in (lambda **given: make_train_step(loss, TX, **given), lambda **given: make_release_step(STACK, TX, **given)):
        make(max_norm=jnp.ones(()))
    make_train_step(loss, TX, microbatches=4, max_norm=1.0, clip_passes=1)
    init_train_state(TX, changed(bias=jnp.ones(())), layered=False)


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (jnp.ones(2, int), "has dtype int32"),
        (3, "has dtype int32"),
        (jnp.ones(2, complex), "has dtype complex64"),
        (jax.random.key(0), "has dtype key"),
        ("x", "is str"),
    ],
    ids=["integers", "a number", "complex", "a key", "a word"],
)
@pytest.mark.parametrize("tx", [TX, SGD], ids=["ours", "optax.sgd"])
def test_parameters_that_cannot_be_trained_are_refused_with_the_remedy(leaf: Any, said: str, tx: Any) -> None:
    with pytest.raises(UnsupportedTensorError, match=rf"params\['w'\] {said}.*Give what the model reads and does not train as"):
        init_train_state(tx, {"w": leaf})


STEPS: dict[str, Any] = {"make_train_step": make_train_step(loss, TX), "make_release_step": make_release_step(STACK, TX)}
if hasattr(jax, "new_ref"):
    STEPS["release_layers"] = release_layers(own_loop, layer, TX)


@pytest.mark.parametrize("step", STEPS)
def test_a_state_that_is_not_a_train_state_is_named_by_its_type(step: str) -> None:
    state = init_train_state(TX, parameters())
    for given in (None, state.params, state.opt_state, tuple(state), jnp.ones(3)):
        kind = "an array" if isinstance(given, jax.Array) else f"a {type(given).__name__}"
        said = f"state is {kind}, not a TrainState; make it with init_train_state"
        with pytest.raises(InvalidArgumentError, match=said):
            STEPS[step](given, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
