"""What a loss function may return and be given besides the loss and the rows of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_training import assert_close, float64
from tests.support.jax_walk import STACK, TX, batch, embed, layer, mean_loss, own_loop, parameters, reference
from tests.support.rows import covering, rows

from penstock.jax_frontend import LayerStack, WeightedMean, init_train_state, make_release_step, make_train_step, release_layers

STEPS: dict[str, Any] = {
    "make_train_step": lambda of, **options: make_train_step(LayerStack(embed, layer, of(mean_loss)), TX, **options),
    "make_release_step": lambda of, **options: make_release_step(LayerStack(embed, layer, of(mean_loss)), TX, **options),
    "in state": lambda of, **options: make_release_step(
        LayerStack(embed, layer, of(mean_loss)), TX, accumulation="state", **options
    ),
    "release_layers": lambda of, **options: release_layers(of(own_loop), layer, TX, **options),
}
CASES = [(name, microbatches) for name in STEPS for microbatches in (1, 4) if microbatches == 1 or name != "release_layers"]
ONE_MICROBATCH_IN_STATE = "in state", 1  # the same program as without


def plain(loss: Any) -> Any:
    return loss


def with_tokens(loss: Any) -> Any:
    """The loss, and the mean of the tokens and all of them as aux."""
    return lambda *given: (loss(*given), {"mean": jnp.mean(given[-1]["tokens"]), "all": given[-1]["tokens"]})


def state_of(name: str, params: Any) -> Any:
    return init_train_state(TX, params, layered=name != "make_train_step")


@pytest.mark.parametrize(("name", "microbatches"), rows(CASES, lambda row: row != ONE_MICROBATCH_IN_STATE))
def test_aux_is_in_the_metrics_and_changes_nothing(name: str, microbatches: int) -> None:
    if name == "release_layers" and not hasattr(jax, "new_ref"):
        pytest.skip("this jax has no jax.new_ref")
    data, options = batch(), {"microbatches": microbatches} if microbatches > 1 else {}
    state, metrics = STEPS[name](with_tokens, has_aux=True, **options)(state_of(name, parameters()), data)
    expected, without = STEPS[name](plain, **options)(state_of(name, parameters()), data)
    assert_close(state, expected, rtol=1e-6, atol=1e-7)
    aux, tokens = metrics.pop("aux"), np.asarray(data["tokens"])
    assert_close(metrics, without, rtol=1e-6)
    chunks = np.stack([tokens[index::microbatches] for index in range(microbatches)])
    np.testing.assert_array_equal(aux["all"], chunks if microbatches > 1 else tokens)
    np.testing.assert_allclose(aux["mean"], chunks.mean((1, 2)) if microbatches > 1 else tokens.mean(), rtol=1e-6)


@pytest.mark.parametrize(("make", "length"), covering([make_train_step, make_release_step], [4, 7]))
def test_leaves_named_whole_are_given_to_every_microbatch(make: Any, length: int) -> None:
    """Of any length, that of a row for each micro-batch or for each sample by coincidence, too."""

    def weighted(outer: Any, x: jax.Array, data: Any) -> WeightedMean:
        each = jnp.mean(x**2, axis=(1, 2)) * jnp.sum(data["context"]["weights"])
        return WeightedMean(jnp.sum(each), each.size)

    stack = LayerStack(embed, layer, weighted)
    with float64():
        data = {**batch(), "context": {"weights": jnp.arange(length, dtype="float64")}}
        state = init_train_state(TX, parameters("float64"), layered=make is make_release_step)
        expected, loss, _ = reference(stack, TX)(jax.tree.map(jnp.copy, state), data)
        state, metrics = make(stack, TX, microbatches=4, whole=("context",))(state, data)
        assert_close((state, metrics["loss"]), (expected, loss), rtol=1e-12, atol=1e-12)


def test_a_plain_pair_of_loss_and_accuracy_trains_on_the_loss() -> None:
    """Taken for (sum, weight), the loss would be divided by the accuracy."""
    step = make_train_step(lambda params, data: (STACK(params, data), jnp.asarray(0.25)), TX, has_aux=True)
    _, metrics = step(state_of("make_train_step", parameters()), batch())
    np.testing.assert_allclose(metrics["loss"], STACK(parameters(), batch()), rtol=1e-6)
    assert metrics["aux"] == 0.25
