"""A call of a step is jax's own path, and the errors of jax are explained."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.support.jax_training import assert_equal

from penstock.core.errors import InvalidArgumentError, UnsupportedTensorError
from penstock.jax_frontend import (
    LayerStack,
    adamw,
    donation,
    init_train_state,
    make_release_step,
    make_train_step,
    make_update,
    release_layers,
    stable_adamw,
)

TX = stable_adamw(1e-2)


def tree(leaves: int = 2) -> dict[str, jax.Array]:
    return {f"leaf {i}": jnp.ones((4, 4)) for i in range(leaves)}


def loss(params: Any, batch: Any) -> jax.Array:
    return sum((jnp.mean((batch["x"] @ leaf) ** 2) for leaf in jax.tree.leaves(params)), jnp.zeros(()))


def update_of(leaves: int) -> Callable[[], None]:
    update, params = make_update(TX), tree(leaves)
    kept: list[Any] = [params, TX.init(params)]
    grads = iter([tree(leaves) for _ in range(3)])

    def call() -> None:
        kept[:] = update(next(grads), kept[1], kept[0])

    return call


def step_of(step: Any, params: Any) -> Callable[[], None]:
    kept, batch = [init_train_state(TX, params)], {"x": jnp.ones((2, 4))}

    def call() -> None:
        kept[0], _ = step(kept[0], batch)

    return call


def train_step_of(leaves: int) -> Callable[[], None]:
    return step_of(make_train_step(loss, TX), tree(leaves))


def stacked(leaves: int) -> dict[str, Any]:
    return {"outer": {}, "layers": {name: leaf[None] for name, leaf in tree(leaves).items()}}


def one_layer(params: Any, x: jax.Array) -> jax.Array:
    return x + sum(jnp.tanh(x @ leaf) for leaf in jax.tree.leaves(params))


def release_step_of(leaves: int) -> Callable[[], None]:
    stack = LayerStack(lambda outer, batch: batch["x"], one_layer, lambda outer, x, batch: jnp.mean(x**2))
    return step_of(make_release_step(stack, TX), stacked(leaves))


def layers_step_of(leaves: int) -> Callable[[], None]:
    def of_stack(outer: Any, layers: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, index: (layers(index, x), None), batch["x"], layers.indices)[0] ** 2)

    return step_of(release_layers(of_stack, one_layer, TX), stacked(leaves))


def python_calls(call: Callable[[], None]) -> list[str]:
    """The Python functions that a call runs, once everything is compiled."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    call(), call()
    gc.collect()
    gc.disable()  # jax has a hook in it
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [name for name in names if not name.startswith(__name__)]


@pytest.mark.parametrize("make", [update_of, train_step_of, release_step_of, layers_step_of])
def test_a_call_runs_the_same_python_for_any_number_of_leaves(make: Callable[[int], Callable[[], None]], monkeypatch) -> None:
    if make is layers_step_of and not hasattr(jax, "new_ref"):
        pytest.skip("this jax has no references")
    monkeypatch.setattr(donation, "_several_cpu_devices", bool)  # false, as in a process with one device
    few, many = python_calls(make(2)), python_calls(make(6))
    assert few == many
    assert len(few) <= 5  # those of a function from jax.jit included: one for each named tuple that comes out


def refused(function: Any, *arguments: Any, match: str, error: type[Exception] = InvalidArgumentError, **kept: Any) -> None:
    """A call is refused with a sentence, from an error of jax, and nothing that was alive is donated."""
    alive = [leaf for leaf in jax.tree.leaves((arguments, kept)) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    for _ in range(2):
        with pytest.raises(error, match=match) as raised:
            function(*arguments, **kept)
        assert raised.value.__cause__ is not None
        assert not any(leaf.is_deleted() for leaf in alive)


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_memory_is_named(compiled: bool) -> None:
    def refuse(tx: Any, grads: Any, state: Any, params: Any, *names: str, **extra_args: Any) -> None:
        update = make_update(tx)
        if compiled:
            update(*jax.tree.map(jnp.copy, (grads, state, params)), **extra_args)
        match = rf"^{names[0]} and {names[1]} are the same memory, which is donated; .*jnp\.copy"
        refused(update, grads, state, params, match=match, **extra_args)

    x = jnp.ones(3)
    tied = {"a": x, "b": x}
    refuse(TX, jax.tree.map(jnp.copy, tied), TX.init(tied), tied, r"params\['a'\]", r"params\['b'\]")
    refuse(TX, x, TX.init(x), x, "grads", "params")
    refuse(TX, jnp.copy(x), TX.init(x), x, "params", "value", value=x)
    averaging = optax.GradientTransformation(lambda params: [params], lambda updates, state, params=None: (updates, state))
    refuse(averaging, jnp.copy(x), averaging.init(x), x, r"state\[0\]", "params")
    lookahead = optax.lookahead(TX, sync_period=2, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(x)
    refuse(lookahead, jnp.copy(x), lookahead.init(both), both, r"params\.\w+", r"params\.\w+")


def test_an_error_names_the_deleted_array() -> None:
    update, params, grads = make_update(TX), {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    state = TX.init(params)
    update(grads, state, params)
    fresh = {"w": jnp.ones(3)}
    match = r"^{} was donated to an earlier update; use what that update returned"
    refused(update, fresh, TX.init(fresh), params, match=match.format(r"params\['w'\]"))
    refused(update, fresh, state, {"w": jnp.ones(3)}, match=match.format(r"state\.count"))
    refused(
        update, grads, TX.init(fresh), fresh, match=r"^grads\['w'\] was deleted.*compute it again, or give that call a copy"
    )


def test_a_step_names_the_array_that_is_refused() -> None:
    step, state, batch = make_train_step(loss, TX), init_train_state(TX, tree()), {"x": jnp.ones((2, 4))}
    new, _ = step(state, batch)
    refused(step, state, batch, match=r"^state\.params\['leaf 0'\] was donated to an earlier update")
    shared = r"^state\.params\['leaf 0'\] and batch\['x'\] are the same memory"
    refused(step, new, {"x": new.params["leaf 0"]}, match=shared)
    refused(step, new, {"x": "text"}, match=r"^batch\['x'\] is str, which is not an array", error=UnsupportedTensorError)
    batch["x"].delete()
    refused(step, new, batch, match=r"^batch\['x'\] was deleted")


def test_an_error_of_the_transform_is_not_changed() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise ValueError("nothing about arrays")

    params = tree()
    params["leaf 1"] = params["leaf 0"]  # not what is told
    with pytest.raises(ValueError, match=r"^nothing about arrays") as raised:
        make_update(optax.GradientTransformation(TX.init, update))(tree(), TX.init(params), params)
    assert raised.type is ValueError


def test_arguments_that_are_only_read_may_share_memory() -> None:
    value, gradient = jnp.ones((4, 4)), jnp.ones((4, 4))
    tx, params = optax.with_extra_args_support(adamw(1e-2)), tree()
    expected, _ = make_update(tx)(tree(), tx.init(params), tree())
    for _ in range(2):
        grads = dict.fromkeys(params, jnp.copy(gradient))
        new, _ = make_update(tx)(grads, tx.init(params), jax.tree.map(jnp.copy, params), value=value, again=value)
        assert_equal(new, expected)
    assert not value.is_deleted()


def test_a_state_that_keeps_the_gradient_is_not_deleted_with_it() -> None:
    tx = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))
    grads = tree()
    _, state = make_update(tx)(grads, jax.tree.map(jnp.zeros_like, grads), tree())
    assert all(leaf.is_deleted() for leaf in grads.values())
    assert_equal(state, tree())


def test_numpy_arrays_and_numbers_are_copied() -> None:
    def given(kind: Any) -> dict[str, Any]:
        return {"array": kind(np.arange(3, dtype=np.float32)), "number": kind(2.0)}

    params = given(lambda value: value)
    new, _ = make_update(TX)(given(lambda value: value), TX.init(params), params)
    expected, _ = make_update(TX)(given(jnp.array), TX.init(params), given(jnp.array))
    assert_equal(new, expected)
    np.testing.assert_array_equal(params["array"], [0.0, 1.0, 2.0])


def test_a_state_may_hold_numbers() -> None:
    traced = []

    def constant(updates: Any, state: Any, params: Any = None) -> Any:
        traced.append(state)
        return updates, 0.5

    update, params, state = make_update(optax.GradientTransformation(lambda params: 0.5, constant)), tree(), 0.5
    for _ in range(3):
        params, state = update(tree(), state, params)
    assert (state, len(traced)) == (0.5, 1)


def test_inside_another_jitted_function_nothing_is_deleted() -> None:
    grads, update = tree(), make_update(TX)
    params, state = tree(), TX.init(tree())
    new, _ = jax.jit(lambda state, params: update(grads, state, params))(state, params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((grads, state, params)))
    expected, _ = update(grads, state, params)
    assert_equal(new, expected)
