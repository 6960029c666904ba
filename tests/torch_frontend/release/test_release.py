"""Release equals the plain optimizer bit for bit, and frees what it should."""

from __future__ import annotations

import pytest
import torch
from tests.support.rules import reference_settings
from tests.support.torch_models import (
    ADAM_FAMILY,
    OPTIMIZERS,
    MomentumSGD,
    batches,
    gone,
    layers,
    loss_of,
    rule_of,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import nn
from torch.optim import lr_scheduler

from penstock.core.errors import RefusedError
from penstock.core.reference import EndOfStep, Gradient, Reference
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import SGD, AdamW, Adan, RAdam, StableAdamW, release_gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_released_equals_plain_bit_for_bit(optimizer_class, dtype: torch.dtype) -> None:
    models = [layers(dtype=dtype), layers(dtype=dtype)]
    optimizers = [optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1) for model in models]
    release_gradients(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(10, dtype=dtype))
    assert unchanged(*(snapshot(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)))


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_one_gradient_is_alive_and_the_ledger_knows(optimizer_class) -> None:
    model = layers(16, 32)
    layer_bytes = (32 * 32 + 32) * 4
    optimizer = optimizer_class(model.parameters())
    with LiveGradientMeter(model.named_parameters()) as plain:
        train(model, optimizer, batches(2, 32))
    assert plain.peak >= 16 * layer_bytes  # the meter can tell
    with (
        LiveGradientMeter(model.named_parameters()) as measured,  # its hooks are there first, and run first
        release_gradients(model, optimizer) as release,
    ):
        for batch in batches(3, 32):
            loss_of(model, batch).backward()
            assert release.ledger.live == measured.live() == 0
            optimizer.step()
            optimizer.zero_grad()
    assert measured.peak == release.ledger.peak <= 1.1 * layer_bytes


SCHEDULERS = {
    "one cycle, beta cycled": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=30),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda i: 1 / (i + 1), lambda i: 0.5**i]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of torch 2.6's SequentialLR, without release too
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler_bit_for_bit_and_without_a_warning(make, tensor_lr: bool) -> None:
    models = [layers(), layers()]
    for number, model in enumerate(models):
        groups = [{"params": list(model[0].parameters()), "lr": 3e-2}, {"params": list(model[1:].parameters())}]
        optimizer = StableAdamW(groups, lr=torch.tensor(1e-2) if tensor_lr else 1e-2)
        if number:
            release_gradients(model, optimizer)
        scheduler = make(optimizer)
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        train(model, optimizer, batches(20), after_step=lambda s=scheduler, p=plateau: s.step(1.0) if p else s.step())
    assert same_parameters(*models)


def test_hold_equals_plain_accumulation_bit_for_bit() -> None:
    """Four micro-batches, a short last group, a parameter that the last micro-batch does not use; with and without sync."""
    for sync in (False, True):
        models = [layers(), layers()]
        extras = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizers = [StableAdamW([*model.parameters(), extra], lr=1e-2) for model, extra in zip(models, extras, strict=True)]
        now = {"i": 0}
        predicate = (lambda now=now: now["i"] % 4 == 3) if sync else None
        release = release_gradients(models[1], optimizers[1], accumulation="hold", sync=predicate)
        for i, batch in enumerate(batches(10)):
            now["i"] = i
            for model, extra in zip(models, extras, strict=True):
                loss = loss_of(model, batch) / 4
                (loss + extra.pow(2).sum() if i % 4 == 1 else loss).backward()
            if sync and i % 4 == 3:
                assert gone(models[1].parameters())
                assert extras[1].grad is not None
            if i % 4 == 3 or i == 9:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert release.ledger.live == 0
        assert same_parameters(*models)
        assert torch.equal(*extras)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("optimizer_class", [*ADAM_FAMILY, MomentumSGD, RAdam, Adan])
def test_state_accumulation_equals_the_reference(optimizer_class, sync: bool) -> None:
    model = layers(3, dtype=torch.float64)
    optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1)
    names = dict(model.named_parameters())
    settings = reference_settings(rule_of(optimizer), 1e-2, weight_decay=0.1, accumulation="state")
    reference = Reference(settings, {name: p.detach().numpy() for name, p in names.items()})
    now = {"i": 0}
    for name, p in names.items():  # records what arrives, before the release's own hook
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: reference.run(Gradient(name, q.grad.numpy().copy(), sync and now["i"] % 3 == 2))
        )
    release = release_gradients(model, optimizer, accumulation="state", sync=(lambda: now["i"] % 3 == 2) if sync else None)
    for i, batch in enumerate(batches(9, dtype=torch.float64)):
        now["i"] = i
        loss_of(model, batch).backward()
        assert gone(model.parameters())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            reference.run(EndOfStep())
    assert release.ledger.peak == 8 * 8 * 8
    for name, p in names.items():
        torch.testing.assert_close(p.detach(), torch.tensor(reference.tensors[name].parameter), rtol=1e-12, atol=1e-13)
        assert optimizer.state[p]["step"] == 3
        assert "mean_square" not in optimizer.state[p]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_micro_batches_in_a_momentum_are_the_whole_batch(decoupled: bool, sync: bool) -> None:
    """Decay once an update, and no dampening in all of the first one; one gradient is alive."""
    settings = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    models = [layers(3, dtype=torch.float64), layers(3, dtype=torch.float64)]
    optimizers = [SGD(model.parameters(), **settings) for model in models]
    now = {"i": 0}
    at_last = {"sync": lambda: now["i"] % 3 == 2} if sync else {}
    release = release_gradients(models[1], optimizers[1], accumulation="state", **at_last)
    for now["i"], batch in enumerate(batches(9, dtype=torch.float64)):
        for model, optimizer in zip(models, optimizers, strict=True):
            (loss_of(model, batch) / 3).backward()
            if now["i"] % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert release.ledger.peak == 8 * 8 * 8
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            optimizers[0].state[a]["momentum_buffer"], optimizers[1].state[b]["momentum_buffer"], rtol=1e-12, atol=1e-13
        )


def test_paused_leaves_gradients_as_plain_torch_does() -> None:
    """A second optimizer trains through the model: the loop of a generator and a discriminator."""
    results = []
    for released in (False, True):
        generator, discriminator = layers(2, seed=5), layers(2, seed=6)
        optimizers = [StableAdamW(m.parameters(), lr=1e-2) for m in (generator, discriminator)]
        releases = [release_gradients(m, o) for m, o in zip((generator, discriminator), optimizers, strict=True) if released]
        for batch in batches(4):
            optimizers[1].zero_grad()
            discriminator(generator(batch).detach()).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = -discriminator(generator(batch)).mean()
            if released:
                with releases[1].paused():
                    loss.backward()
                assert all(p.grad is not None for p in discriminator.parameters())
                assert gone(generator.parameters())
            else:
                loss.backward()
            optimizers[0].step()
        results.append((generator, discriminator))
    assert all(same_parameters(a, b) for a, b in zip(*results, strict=True))


def test_held_gradients_are_discarded_replaced_and_left_as_by_a_plain_loop() -> None:
    """zero_grad() discards, a gradient set by hand is used, remove() in mid-group leaves a plain optimizer."""
    models = [layers(), layers()]
    optimizers = [StableAdamW(model.parameters(), lr=1e-2) for model in models]
    release = release_gradients(models[1], optimizers[1], accumulation="hold")
    given = batches(4)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, given[0]).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, given[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, given[2]).backward()
        if optimizer.release:
            release.remove()
        loss_of(model, given[3]).backward()
        optimizer.step()
    # A plain zero_grad(set_to_none=False) leaves zeros, which add the same.
    assert same_parameters(*models)
    assert optimizers[1].release is None


def test_a_paused_backward_joins_its_group_of_micro_batches() -> None:
    """The gradient that was kept joins the group at step(), and what is in the moments is not lost."""
    models = [layers(2, dtype=torch.float64), layers(2, dtype=torch.float64)]
    optimizers = [StableAdamW(m.parameters(), lr=1e-2) for m in models]
    releases = [release_gradients(m, o, accumulation="state") for m, o in zip(models, optimizers, strict=True)]
    first, second = batches(2, dtype=torch.float64)
    for number, (model, optimizer, release) in enumerate(zip(models, optimizers, releases, strict=True)):
        loss_of(model, first).backward()
        if number:
            with release.paused():
                loss_of(model, second).backward()
            with pytest.raises(RefusedError, match=r"step\(\) before"):
                optimizer.zero_grad()
        else:
            loss_of(model, second).backward()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_new_tensor_as_learning_rate_is_seen() -> None:
    """Under release, often at the address of the one before; a plain optimizer gets the same numbers."""
    models = [layers(), layers()]
    optimizers = [AdamW(model.parameters(), lr=kind(0.1)) for model, kind in zip(models, (float, torch.tensor), strict=True)]
    release_gradients(models[1], optimizers[1])
    for number, batch in enumerate(batches(40)):
        for model, optimizer, kind in zip(models, optimizers, (float, torch.tensor), strict=True):
            optimizer.param_groups[0]["lr"] = None
            optimizer.param_groups[0]["lr"] = kind(1e-3 * number)
            train(model, optimizer, [batch])
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_a_release_says_what_it_releases_and_how() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, accumulation="hold", max_norm=1.0)
    said = "accumulation='hold', max_norm=1.0"
    assert repr(release) == f"<Release of 4 parameters of AdamW, {said}>"
    with release.paused():
        assert repr(release) == f"<Release of 4 parameters of AdamW, {said}, paused>"
    release.remove()
    assert repr(release) == f"<Release of 0 parameters of AdamW, {said}, removed>"
    assert repr(release_gradients(model, optimizer)) == "<Release of 4 parameters of AdamW, accumulation=None, max_norm=None>"
