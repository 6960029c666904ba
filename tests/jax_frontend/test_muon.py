"""Muon in JAX: matrix by matrix, beside AdamW, and never across the layers of a stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import assert_close, float64, train, train_directly
from tests.support.rules import reference_settings

from penstock.core.codings import EightBit
from penstock.core.errors import InvalidArgumentError, UnsupportedTensorError
from penstock.core.reference import Gradient, Reference
from penstock.core.rules import RULES
from penstock.jax_frontend import (
    LayerStack,
    adamw,
    init_train_state,
    make_release_step,
    muon,
    one_by_one,
    param_labels_for_muon,
)
from penstock.jax_frontend.transforms import Transform

EXACT: dict[str, Any] = {"ns_dtype": "float32"}  # float64 for float64 parameters
STACK = LayerStack(lambda o, b: b @ o["embed"], lambda p, x: x + jnp.tanh(x @ p), lambda o, x, b: jnp.mean((x - 1) ** 2))


def together(make: Transform = muon, **settings: Any) -> optax.GradientTransformationExtraArgs:
    return optax.partition(
        {"muon": make(1e-2, weight_decay=0.1, **EXACT, **settings), "adamw": adamw(1e-2)}, param_labels_for_muon
    )


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def by_reference(rule: str, start: np.ndarray, given: list[np.ndarray], **changed: Any) -> np.ndarray:
    run = Reference(reference_settings(RULES[rule], 1e-2, **changed), {"p": start})
    for gradient in given:
        run.run(Gradient("p", gradient))
    return run.tensors["p"].parameter


@pytest.mark.parametrize("way", [train, train_directly])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_and_adamw_are_one_transform(way: Any, nesterov: bool) -> None:
    """Flax's kernels have their outputs along the last axis: the scale is that of 7 outputs and 3 inputs."""
    shapes = {"kernel": (3, 7), "bias": (7,), "embedding": (5, 3)}
    with float64():
        params = {name: jnp.asarray(random(*shape)) for name, shape in shapes.items()}
        grads = [{name: random(*shape, seed=step) for name, shape in shapes.items()} for step in range(1, 6)]
        found, _ = way(together(nesterov=nesterov), params, jax.tree.map(jnp.asarray, grads))
        for name in shapes:
            given = [gradient[name] for gradient in grads]
            own: dict[str, Any] = {"weight_decay": 0.1, "nesterov": nesterov, "output_axis": 1} if name == "kernel" else {}
            rule = "muon" if name == "kernel" else "adamw"
            own = own or {"weight_decay": 1e-4}
            np.testing.assert_allclose(found[name], by_reference(rule, params[name], given, **own), rtol=1e-12, atol=1e-12)


def test_the_layers_of_a_stack_are_orthogonalised_one_by_one() -> None:
    with float64():
        params = {"outer": {"embed": jnp.eye(4)}, "layers": jnp.asarray(random(3, 4, 4))}
        data, tx = jnp.asarray(random(2, 4)), together()
        g = jax.grad(STACK)(params, data)["layers"]
        state, _ = make_release_step(STACK, tx)(init_train_state(tx, params), data)
        for layer in range(3):
            expected = by_reference("muon", params["layers"][layer], [g[layer]], weight_decay=0.1)
            np.testing.assert_allclose(state.params["layers"][layer], expected, rtol=1e-12, atol=1e-12)


def test_micro_batches_go_into_the_momentum_exactly_without_nesterov() -> None:
    """A model of matrices alone: accumulation="state" takes one of penstock's transforms."""
    with float64():
        params = {"outer": {"embed": jnp.eye(4)}, "layers": jnp.asarray(random(3, 4, 4))}
        data, tx, found = jnp.asarray(random(6, 4)), muon(1e-2, nesterov=False, weight_decay=0.1, **EXACT), []
        for options in ({}, {"microbatches": 3, "accumulation": "state"}):
            step, state = make_release_step(STACK, tx, **options), init_train_state(tx, params)  # type: ignore[arg-type]
            for _ in range(3):
                state, _ = step(state, data)
            found.append(state)
        assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "accumulation": "state"}], ids=str)
def test_a_coded_momentum_is_orthogonalised_as_a_whole_matrix(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other rules are updated some rows after the other."""
    params = {"outer": {"embed": jnp.eye(128)}, "layers": jnp.asarray(random(2, 128, 128), "float32") / 16}
    tx, found = muon(1e-2, nesterov=False, mu_dtype="8bit", **EXACT), []
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for piece in (7 * 128, 2**20):
        monkeypatch.setattr(one_by_one, "PIECE", piece)
        step, state = make_release_step(STACK, tx, **options), init_train_state(tx, params)
        assert isinstance(state.opt_state.layers.fields["momentum_buffer"], EightBit)
        found.append(step(state, jnp.asarray(random(4, 128), "float32"))[0])
    assert_close(found[0].params, found[1].params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_muon_refuses_a_parameter_that_is_not_a_matrix_by_its_path(shape: tuple[int, ...]) -> None:
    """A stack of layers, too, that is not declared: it would not be a matrix, or be one across its layers."""
    described = r"params\['a'\]\[1\] has shape .* give it to adamw with optax.partition"
    for make in (muon(1e-3).init, lambda params: init_train_state(muon(1e-3), params)):
        with pytest.raises(UnsupportedTensorError, match=described):
            make({"a": [jnp.ones((2, 2)), jnp.ones(shape)]})


def test_labels_count_the_axes_of_one_layer() -> None:
    outer = {"embed": jnp.ones((4, 2)), "lm_head": {"kernel": jnp.ones((2, 4))}, "mix": jnp.ones((2, 2))}
    layer = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    expected = {"embed": "adamw", "lm_head": {"kernel": "adamw"}, "mix": "muon"}, {"kernel": "muon", "scale": "adamw"}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), layer)
    assert (param_labels_for_muon(outer), param_labels_for_muon(layer)) == expected
    assert param_labels_for_muon({"outer": outer, "layers": stacked}) == dict(zip(("outer", "layers"), expected, strict=True))


def test_labels_know_vectors_and_embeddings_by_their_names() -> None:
    """A stacked bias or scale, or the bias of attention heads, has two axes and is not a matrix; nor are GPT-2's embeddings."""
    vectors = {"ln": {"scale": jnp.ones((4, 8)), "bias": jnp.ones((4, 8))}, "query": {"bias": {"value": jnp.ones((2, 4))}}}
    embeddings = {
        "wte": jnp.ones((50, 8)),
        "wpe": {"embedding": jnp.ones((16, 8))},
        "logits_dense": {"kernel": jnp.ones((8, 50))},
    }
    assert set(jax.tree.leaves(param_labels_for_muon([vectors, embeddings]))) == {"adamw"}
    assert param_labels_for_muon({"rescale": jnp.ones((4, 8))}) == {"rescale": "muon"}


def test_settings_of_the_iteration_cannot_be_injected() -> None:
    params = {"a": jnp.ones((2, 3))}
    with pytest.raises(InvalidArgumentError, match=r"ns_steps is an array, .* static_args=\(.*'ns_steps', "):
        optax.inject_hyperparams(muon)(1e-2).init(params)
    static = optax.inject_hyperparams(muon, static_args=("ns_steps", "output_axis", "seed"))(lambda count: 1e-2)
    train(static, params, [params])
