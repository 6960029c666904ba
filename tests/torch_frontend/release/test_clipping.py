"""Clipping under release: exact where it says so, and refused where it cannot be."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, same_parameters, snapshot, train, unchanged

from penstock.core.errors import InvalidArgumentError, NonFiniteGradientError, RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

MAX_NORM = 0.05


def clipped_plainly(model, optimizer, given, micro_batches: int = 1) -> list[torch.Tensor]:
    norms = []
    for start in range(0, len(given), micro_batches):
        for batch in given[start : start + micro_batches]:
            loss_of(model, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_guard_clips_the_global_norm_as_torch_does_with_one_gradient_alive() -> None:
    models = [layers(16, 32), layers(16, 32)]
    optimizers = [StableAdamW(model.parameters(), lr=1e-2) for model in models]
    norms = clipped_plainly(models[0], optimizers[0], batches(20, 32))
    assert max(norms) > MAX_NORM
    release = release_gradients(models[1], optimizers[1], max_norm=MAX_NORM)
    seen = []
    with LiveGradientMeter(models[1].named_parameters()) as measured:
        train(models[1], optimizers[1], batches(20, 32), loss=release.guard, after_step=lambda: seen.append(release.last_norm))
    torch.testing.assert_close(seen[0].float(), norms[0], rtol=1e-6, atol=0)  # of the same gradient, in another order
    torch.testing.assert_close(torch.stack(seen).float(), torch.stack(norms), rtol=1e-4, atol=0)  # of runs 1e-5 apart
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert measured.peak == release.ledger.peak <= 1.1 * (32 * 32 + 32) * 4


def test_guard_refuses_bad_losses_and_unclipped_gradients() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(InvalidArgumentError, match=r"loss has shape \(6, 8\)"):
        release.guard(model(batches(1)[0]))
    loss = release.guard(loss_of(model, batches(1)[0]))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RefusedError, match="twice on a guarded loss"):
        loss.backward()
    before = snapshot(model, optimizer)
    with release.paused():
        loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RefusedError, match=r"earlier backward.*zero_grad"):
        release.guard(loss_of(model, batches(1)[0])).backward()
    assert unchanged(before, snapshot(model, optimizer))
    with torch.no_grad():
        assert not release.guard(loss_of(model, batches(1)[0])).requires_grad


def test_overflow_under_guard_changes_nothing() -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), on_nonfinite="skip")
    release = release_gradients(model, optimizer, max_norm=1.0)
    train(model, optimizer, batches(1), loss=release.guard)
    before = snapshot(model, optimizer)
    handle = model[0][0].weight.register_hook(lambda g: g * float("nan"))
    train(model, optimizer, batches(1), loss=release.guard)
    assert unchanged(before, snapshot(model, optimizer))
    assert release.skipped == 1
    handle.remove()
    train(model, optimizer, batches(1), loss=release.guard)
    assert not unchanged(before, snapshot(model, optimizer))


def test_guard_adds_nothing_to_gradients_that_are_not_its_own() -> None:
    """A head with an optimizer of its own, an input that requires a gradient, a layer unfrozen after set-up."""
    found = []
    for released in (False, True):
        model, head = layers(3), torch.nn.Linear(8, 2)
        torch.nn.init.ones_(head.weight)
        torch.nn.init.zeros_(head.bias)
        for p in model[0].parameters():
            p.requires_grad_(False)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, max_norm=MAX_NORM) if released else None
        for p in model[0].parameters():
            p.requires_grad_(True)
        x = batches(1)[0].requires_grad_()
        loss = head(model(x)).pow(2).mean()
        (release.guard(loss) if release else loss).backward()
        if not released:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found.append((x.grad, head.weight.grad, *model.parameters(), norm if not released else release.last_norm.float()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_two_guards_or_a_guard_over_another_release_are_refused_before_anything_changes() -> None:
    model = layers()
    first, second = AdamW(model[0].parameters()), AdamW(model[1:].parameters())
    releases = [release_gradients(model, first, max_norm=1.0), release_gradients(model, second, max_norm=1.0)]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RefusedError, match="guarded already"):
        releases[0].guard(releases[1].guard(loss_of(model, batches(1)[0])))
    with pytest.raises(RefusedError, match="another optimizer's release"):
        releases[0].guard(loss_of(model, batches(1)[0])).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_two_guarded_releases_train_a_generator_and_its_discriminator() -> None:
    """The generator's loss goes back through the discriminator, whose release is paused."""
    plain, released = [[layers(2, seed=0), layers(2, seed=1)] for _ in range(2)]
    for models in (plain, released):
        optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
        (generator, discriminator), (steps, judges) = models, optimizers
        releases = [
            release_gradients(*pair, max_norm=1e9) for pair in zip(*(models, optimizers), strict=True) if models is released
        ]
        guards = [release.guard for release in releases] or [lambda loss: loss] * 2
        for batch in batches(3):
            guards[1](loss_of(discriminator, generator(batch).detach())).backward()
            judges.step()
            judges.zero_grad()
            with releases[1].paused() if releases else contextlib.nullcontext():
                guards[0](loss_of(discriminator, generator(batch))).backward()
            steps.step()
            steps.zero_grad()
            judges.zero_grad()
    for one, other in zip(plain, released, strict=True):
        assert same_parameters(one, other)


def test_finiteness_is_judged_on_elements_and_norms_do_not_overflow() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters(), on_nonfinite="skip")
    release = release_gradients(model, optimizer, max_norm=1.0)
    model[0][0].weight.register_hook(lambda g: torch.full_like(g, 1e25))  # its square is beyond float32
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1), loss=release.guard)
    assert release.skipped == 0
    assert float(release.last_norm) == pytest.approx(8e25, rel=1e-6)
    assert not torch.equal(before[0], model[0][0].weight)


def test_guard_works_with_both_kinds_of_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        models = [layers(), layers()]
        optimizers = [StableAdamW(m.parameters(), lr=1e-2) for m in models]
        clipped_plainly(models[0], optimizers[0], batches(3))
        release = release_gradients(models[1], optimizers[1], max_norm=MAX_NORM)
        for batch in batches(3):
            x = batch.clone().requires_grad_()
            for layer in models[1]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            release.guard(x.pow(2).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["module", "method", "closure", "partial"])
def test_a_head_behind_a_reentrant_checkpoint_gets_its_gradient_once(how: str) -> None:
    """The checkpoint hides the head's parameters from the graph, and each of the two passes runs it."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for released in (False, True):
        model, head = layers(2), layers(1, seed=3)
        function = {
            "module": head,
            "method": head.forward,
            "closure": lambda x, head=head: head(x),
            "partial": functools.partial(lambda module, x: module(x), head),
        }[how]
        release = release_gradients(model, AdamW(model.parameters()), max_norm=1.0) if released else None
        loss = checkpoint(function, model(batches(1)[0]), use_reentrant=True).pow(2).mean()
        (release.guard(loss) if release else loss).backward()
        found.append([p.grad for p in head.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def parts() -> torch.nn.ModuleList:
    return torch.nn.ModuleList([layers(2, seed=1), layers(2, seed=2)])


def test_a_second_guarded_backward_is_refused_even_of_other_parameters() -> None:
    """Each would be clipped by its own norm: the norm of the whole gradient is of both."""
    model = parts()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=MAX_NORM)
    batch = batches(1)[0]
    release.guard(loss_of(model[0], batch)).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"second guarded backward.*guard their sum"):
        release.guard(loss_of(model[1], batch)).backward()
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.step()
    release.guard(loss_of(model[0], batch) + loss_of(model[1], batch)).backward()
    optimizer.step()


def test_a_gradient_beside_an_overflow_is_refused() -> None:
    """Without release the sum of both would overflow, and the step be skipped."""
    model = layers(2)
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    release = release_gradients(model, optimizer, scaler=scaler)
    scaler.scale(release.guard(loss_of(model, batches(1)[0]) * float("inf"))).backward()
    with release.paused():
        scaler.scale(loss_of(model, batches(1)[0])).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"'0\.0\.weight'.*was not finite.*zero_grad"):
        scaler.step(optimizer)
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    scaler.update()
    release.guard(loss_of(model, batches(1)[0])).backward()
    optimizer.step()


@pytest.mark.parametrize("how", ["by hand", "paused"])
def test_a_gradient_that_the_norm_does_not_include_is_refused(how: str) -> None:
    model = parts()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=MAX_NORM)
    release.guard(loss_of(model[0], batches(1)[0])).backward()
    if how == "by hand":
        model[1][0][0].bias.grad = torch.ones(8)
    else:
        with release.paused():
            loss_of(model[1], batches(1)[0]).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"'1\.0\.0\.(weight|bias)'.*does not include"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    train(model[1], optimizer, batches(1), loss=release.guard)


def test_a_nonfinite_guarded_backward_leaves_other_gradients_unchanged() -> None:
    model, head = layers(2), torch.nn.Linear(8, 2)
    optimizer = AdamW(model.parameters(), on_nonfinite="raise")
    release = release_gradients(model, optimizer, max_norm=1.0)
    head.weight.grad = torch.ones(2, 8)
    model[0][0].weight.register_hook(lambda g: g * float("nan"))
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteGradientError, match="nothing was updated"):
        release.guard(loss_of(torch.nn.Sequential(model, head), batches(1)[0])).backward()
    assert torch.equal(head.weight.grad, torch.ones(2, 8))
    assert head.bias.grad is None
    assert unchanged(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
