"""Checkpoints of activations under release: the plain loop's numbers, or a refusal before the first wrong update."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.support.torch_models import (
    batches,
    gone,
    layers,
    plain_and_released,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, prepare_for_gradient_release, release_gradients


class Calls:
    """A function that is an object."""

    def __init__(self, layer: nn.Module) -> None:
        self.parameters = dict(layer[0].named_parameters())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, **self.parameters))


def of_tensors(layer: nn.Module):
    weight, bias = layer[0].weight, layer[0].bias
    return lambda x: torch.tanh(nn.functional.linear(x, weight, bias))


CALLS = {
    "a module": lambda layer: layer,
    "its bound method": lambda layer: layer.forward,
    "a partial": lambda layer: functools.partial(layer.__call__),
    "a closure": lambda layer: lambda x: layer(x),
    "a closure over tensors": of_tensors,
    "an object": Calls,
}


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx, compute, x):
        ctx.compute = compute
        ctx.save_for_backward(x)
        with torch.no_grad():
            return compute(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.compute(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


reentrant = functools.partial(checkpoint, use_reentrant=True)

PLACES = {
    "twice": lambda layer, call, x: reentrant(call, reentrant(call, x)),
    "below": lambda layer, call, x: reentrant(call, layer(x)),
    "above": lambda layer, call, x: layer(reentrant(call, x)),
    "in two branches": lambda layer, call, x: reentrant(call, x) + reentrant(call, 2 * x),
    "in one checkpoint": lambda layer, call, x: reentrant(lambda y: reentrant(call, y) + layer(y), x),
    "above others' checkpoint": lambda layer, call, x: layer(OwnCheckpoint.apply(call, x)),
    "in others' checkpoints": lambda layer, call, x: OwnCheckpoint.apply(call, OwnCheckpoint.apply(call, x)),
}


@pytest.mark.parametrize(("call", "place"), [*((c, "twice") for c in CALLS), *(("a module", p) for p in PLACES)][1:])
@pytest.mark.parametrize("policy", ["release", "state", "lenient"])
def test_reentrant_checkpoints_of_a_layer_used_twice_raise_before_the_first_wrong_update(call, place, policy) -> None:
    """Its gradient comes in two parts, one of them perhaps from a use without a checkpoint."""
    model = layers(2)
    optimizer = AdamW(model.parameters(), gradient_release=policy == "lenient")
    if policy == "lenient":
        prepare_for_gradient_release(model, optimizer)
    else:
        release_gradients(model, optimizer, accumulation=None if policy == "release" else policy)
    before = snapshot(model[0], optimizer)
    x = PLACES[place](model[0], CALLS[call](model[0]), batches(1)[0].requires_grad_())
    with pytest.raises(RefusedError, match=r"'0\.0\.\w+'.*in several parts.*use_reentrant=False"):
        reentrant(model[1], x).pow(2).mean().backward()
    assert unchanged(before, snapshot(model[0], optimizer))
    if policy != "state":
        optimizer.zero_grad()
        assert optimizer.release.ledger.live == 0
        train(model, optimizer, batches(1))


def test_a_gradient_in_parts_is_refused_in_time_again_after_a_refusal() -> None:
    """The first part is that of the use without a checkpoint."""
    model = layers(1)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    before = snapshot(model, optimizer)
    for _ in range(2):
        loss = PLACES["above"](model[0], model[0], batches(1)[0].requires_grad_()).pow(2).mean()
        with pytest.raises(RefusedError, match="in several parts"):
            loss.backward()
        assert unchanged(before, snapshot(model, optimizer))
        optimizer.zero_grad()


@pytest.mark.parametrize("own", [False, True], ids=["torch's", "others'"])
def test_a_gradient_in_parts_is_refused_in_time_after_backwards_without_a_checkpoint(own: bool) -> None:
    """The later model is another one, of which the use without a checkpoint comes first in backward."""
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    train(model, optimizer, batches(2))
    before, x = snapshot(model, optimizer), model[1](batches(1)[0])
    for _ in range(2):
        y = OwnCheckpoint.apply(model[0], x) if own else reentrant(model[0], x)
        with pytest.raises(RefusedError, match=r"'0\.0\.\w+'.*in several parts"):
            model[0](y).pow(2).mean().backward()
        assert unchanged(before, snapshot(model, optimizer))
        optimizer.zero_grad()
        x = model[1](batches(1)[0])
    train(model, optimizer, batches(1))


@pytest.mark.parametrize("lenient", [False, True])
def test_a_learning_rate_set_between_backwards_is_used_behind_reentrant_checkpoints(lenient: bool) -> None:
    """Where the first gradient of the second backward comes from a checkpoint."""
    models, last = [layers(2), layers(2)], [False]
    for released, model in enumerate(models):
        optimizer = AdamW(model.parameters(), gradient_release=bool(lenient and released))
        if lenient and released:
            prepare_for_gradient_release(model, optimizer)
        elif released:
            release_gradients(model, optimizer, accumulation="hold", sync=lambda: last[0])
        for last[0] in (False, True):
            optimizer.param_groups[0]["lr"] = 1e-1 if last[0] else 1e-3
            reentrant(model[1], model[0](batches(1)[0])).pow(2).mean().backward()
            if last[0] or (lenient and not released):
                optimizer.step()
                optimizer.zero_grad()
    assert same_parameters(*models)


def test_reentrant_checkpoints_of_a_layer_used_twice_raise_in_the_measuring_pass() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1.0)
    before = snapshot(model, optimizer)
    x = batches(1)[0].requires_grad_()
    for layer in (model[0], model[1], model[0]):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RefusedError, match="in several parts"):
        release.guard(x.pow(2).mean()).backward()
    assert unchanged(before, snapshot(model, optimizer))
    assert gone(model.parameters())


@pytest.mark.parametrize("arguments", [{"accumulation": "hold"}, {}, {"max_norm": 1e9}], ids=["hold", "release", "guard"])
def test_a_layer_used_twice_in_checkpoints_equals_the_plain_loop(arguments) -> None:
    """Without reentrance always; with it where gradients are held."""

    def trained(reentrant: bool):
        def run(model, optimizer, guard) -> None:
            for batch in batches(3):
                x = batch.clone().requires_grad_()
                for layer in (model[0], model[1], model[0]):
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                guard(x.pow(2).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    assert same_parameters(*plain_and_released(trained(False), **arguments))
    if "accumulation" in arguments:
        assert same_parameters(*plain_and_released(trained(True), **arguments))
