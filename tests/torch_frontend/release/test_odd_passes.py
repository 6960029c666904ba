"""Backward passes out of the ordinary: shared and unused parameters, gradients that are not finite, failures, checkpoints."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.support.torch_models import batches, gone, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import NonFiniteGradientError
from penstock.torch_frontend import AdamW, StableAdamW, prepare_for_gradient_release, release_gradients


def test_tied_reused_frozen_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.block = nn.Linear(6, 6)
            self.frozen = nn.Linear(6, 6)
            self.unused = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight
            for p in self.frozen.parameters():
                p.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.block(self.block(self.embedding(tokens)))
            return self.head(self.frozen(x))

    models = []
    for released in (False, True):
        torch.manual_seed(0)
        model = Odd()
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        if released:
            release_gradients(model, optimizer)
        for i in range(6):
            if i == 3:  # unfrozen while training: released from the next step() on
                for p in model.frozen.parameters():
                    p.requires_grad_(True)
            model(torch.arange(5)).pow(2).mean().backward()
            assert not released or i < 4 or gone(model.frozen.parameters())
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        assert optimizer.state[model.embedding.weight]["step"] == 6
        assert not optimizer.state[model.unused.weight]
    assert same_parameters(*models)


def test_non_finite_gradients_are_skipped_one_by_one_and_counted() -> None:
    model = layers(3)
    optimizer = StableAdamW(model.parameters(), on_nonfinite="skip")
    release = release_gradients(model, optimizer)
    train(model, optimizer, batches(1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model[1][0].weight.register_hook(lambda g: g * float("nan"))
    train(model, optimizer, batches(1))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(before) - {"1.0.weight"}
    assert (release.skipped, optimizer.skipped) == (1, 1)
    assert optimizer.state[model[1][0].weight]["step"] == 1


def test_held_gradients_are_judged_together_as_a_plain_step_does() -> None:
    models = [layers(), layers()]
    optimizers = [StableAdamW(m.parameters(), lr=1e-2, on_nonfinite="skip") for m in models]
    release_gradients(models[1], optimizers[1], accumulation="hold")
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(1))
        handle = model[1][0].weight.register_hook(lambda g: g * float("inf"))
        train(model, optimizer, batches(1))
        handle.remove()
        train(model, optimizer, batches(1))
        assert optimizer.skipped == 1
    assert same_parameters(*models)
    model = layers()
    optimizer = AdamW(model.parameters(), on_nonfinite="raise")
    release_gradients(model, optimizer, accumulation="hold")
    model[0][0].weight.register_hook(lambda g: g * float("inf"))
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteGradientError):
        train(model, optimizer, batches(1))
    assert unchanged(before, snapshot(model, optimizer))


@pytest.mark.parametrize("lenient", [False, True])
def test_a_layer_frozen_after_the_forward_gets_nothing_from_its_backward(lenient: bool) -> None:
    """As if it had been frozen before: what is in `.grad`, or in the moments, stays what it was."""
    found = []
    for late in (False, True):
        model = layers()
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=lenient)
        if lenient:
            prepare_for_gradient_release(model, optimizer)
        else:
            release_gradients(model, optimizer, accumulation="state")
        with optimizer.release.paused() if lenient else contextlib.nullcontext():
            loss_of(model, batches(2)[0]).backward()
        model[0].requires_grad_(late)
        loss = loss_of(model, batches(2)[1])
        model[0].requires_grad_(False)
        loss.backward()
        found.append(snapshot(model, optimizer))
        optimizer.step()
        found.append(snapshot(model, optimizer))
    assert unchanged(found[0], found[2])
    assert unchanged(found[1], found[3])


def test_a_paused_gradient_completes_the_micro_batches_of_a_lenient_release_in_step() -> None:
    """As the last micro-batch would, where step() had discarded it."""
    found = []
    for paused in (False, True):
        model = layers()
        optimizer = AdamW(model.parameters(), lr=1e-2, gradient_release=True)
        prepare_for_gradient_release(model, optimizer)
        optimizer.optimizer_accumulation = True
        loss_of(model, batches(2)[0]).backward()
        optimizer.optimizer_accumulation = paused
        with optimizer.release.paused() if paused else contextlib.nullcontext():
            loss_of(model, batches(2)[1]).backward()
        optimizer.step()
        found.append(snapshot(model, optimizer))
    assert unchanged(*found)
