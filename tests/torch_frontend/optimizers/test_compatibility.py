"""The calls of the original library run with nothing but the import changed, and leniently."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.torch_models import ADAM_FAMILY, batches, gone, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.reference import Gradient, Reference, Settings
from penstock.torch_frontend import (
    AdamW,
    StableAdamW,
    param_groups_weight_decay,
    prepare_for_gradient_release,
    remove_gradient_release,
    to_low_precision,
)


def test_the_original_example_runs_with_its_import_changed() -> None:
    model = nn.Linear(20, 1, dtype=torch.bfloat16)
    opt = AdamW(model.parameters(), lr=1e-3, gradient_release=True)
    prepare_for_gradient_release(model, opt)
    scheduler = CosineAnnealingLR(opt, 10)
    before = model.weight.detach().clone()
    loss = model(torch.randn(20, dtype=torch.bfloat16))
    loss.backward()
    assert not torch.equal(model.weight, before)
    assert gone(model.parameters())
    scheduler.step()  # no warning: a step was taken
    remove_gradient_release(model)
    model(torch.randn(20, dtype=torch.bfloat16)).backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("boundaries", ["never", "at random"])
@pytest.mark.parametrize("optimizer_class", ADAM_FAMILY)
def test_optimizer_accumulation_equals_the_reference(optimizer_class, boundaries: str) -> None:
    model = layers(2, dtype=torch.float64)
    optimizer = optimizer_class(
        model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, gradient_release=True
    )
    s = Settings(optimizer.rule.name, 1e-2, (0.9, 0.99), 1e-6, 0.1, accumulation="state")
    reference = Reference(s, {name: p.detach().numpy() for name, p in model.named_parameters()})
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: reference.run(Gradient(name, q.grad.numpy().copy(), not optimizer.optimizer_accumulation))
        )
    prepare_for_gradient_release(model, optimizer)
    chance = random.Random(0)

    def perhaps() -> None:
        if boundaries == "at random":
            if chance.random() < 0.4:
                optimizer.step()
            if chance.random() < 0.4:
                optimizer.zero_grad()

    for i, batch in enumerate(batches(12, dtype=torch.float64)):
        perhaps()
        optimizer.optimizer_accumulation = (i + 1) % 4 != 0
        loss = loss_of(model, batch)
        perhaps()
        loss.backward()
        perhaps()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), torch.tensor(reference.tensors[name].parameter), rtol=1e-12, atol=1e-13)
        assert optimizer.state[p]["step"] == 3


@pytest.mark.parametrize("unfrozen", [0, 3], ids=["the last to get a gradient", "the first"])
def test_without_accumulation_it_equals_the_plain_optimizer(unfrozen: int) -> None:
    """Without any step(): layers that are unfrozen are updated from their first gradient on."""
    models = [layers(), layers()]
    optimizers = [StableAdamW(m.parameters(), lr=1e-2, gradient_release=bool(i)) for i, m in enumerate(models)]
    for model in models:
        model[unfrozen].requires_grad_(False)
    prepare_for_gradient_release(models[1], optimizers[1])
    for number, batch in enumerate(batches(6)):
        if number == 2:
            for model in models:
                model[unfrozen].requires_grad_(True)
        train(models[0], optimizers[0], [batch])
        loss_of(models[1], batch).backward()
        assert gone(models[1].parameters())
    assert same_parameters(*models)


def test_removing_applies_what_waits_in_the_moments() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), gradient_release=True)
    prepare_for_gradient_release(model, optimizer)
    optimizer.optimizer_accumulation = True
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batches(1)[0]).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(RefusedError, match=r"run the backward\(\) .* optimizer\.optimizer_accumulation=False, first\."):
        optimizer.state_dict()
    remove_gradient_release(model)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_optimizers_that_were_not_made_for_it_are_refused() -> None:
    model = layers()
    with pytest.raises(RefusedError, match="without gradient_release=True"):
        prepare_for_gradient_release(model, AdamW(model.parameters()))
    with pytest.raises(InvalidArgumentError, match="penstock"):
        prepare_for_gradient_release(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RefusedError, match="not released"):
        remove_gradient_release(model)
    with pytest.raises(RefusedError, match=r"on_nonfinite='raise'"):
        prepare_for_gradient_release(model, AdamW(model.parameters(), gradient_release=True, on_nonfinite="raise"))


def test_until_it_is_prepared_it_is_a_plain_optimizer() -> None:
    models = [layers(), layers()]
    optimizers = [AdamW(m.parameters(), gradient_release=bool(i)) for i, m in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(3))
    assert unchanged(*(snapshot(m, o) for m, o in zip(models, optimizers, strict=True)))


def test_biases_norms_and_named_layers_are_not_decayed() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 2)})
    model["embed"].weight.requires_grad_(True)
    plain, decayed = param_groups_weight_decay(model, 0.5)
    assert (plain["weight_decay"], decayed["weight_decay"]) == (0.0, 0.5)
    assert {id(p) for p in decayed["params"]} == {id(model["embed"].weight), id(model["out"].weight)}
    exempt, decayed = param_groups_weight_decay(model, additional_layers=["embed"])
    assert [id(p) for p in decayed["params"]] == [id(model["out"].weight)]
    assert len(exempt["params"]) == 4
    StableAdamW(param_groups_weight_decay(nn.LayerNorm(3)))  # one of the groups may be empty


def test_to_low_precision_keeps_embeddings_and_rotary_buffers_in_float32() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.rotary = nn.Module()
            self.rotary.register_buffer("angles", torch.ones(2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    model = nn.Sequential(nn.Embedding(3, 2), Block())
    assert to_low_precision(model) is model
    assert model[0].weight.dtype is torch.float32
    assert model[1].linear.weight.dtype is torch.bfloat16
    assert model[1].rotary.angles.dtype is torch.float32
    assert model[1].count.dtype is torch.int64
    to_low_precision(model, torch.float16, fp32_modules=None, fp32_buffers=None)
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float16, torch.int64}
    with pytest.raises(InvalidArgumentError, match=r"dtype=torch.float32.*bfloat16"):
        to_low_precision(model, torch.float32)
    with pytest.raises(InvalidArgumentError, match="fp32_modules"):
        to_low_precision(model, fp32_modules=[int])
