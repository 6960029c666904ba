"""An unmodified torch.amp.GradScaler: bit for bit the numbers of the plain loop, and all or nothing on overflow."""

from __future__ import annotations

import pytest
import torch
from tests.support.torch_models import OPTIMIZERS, batches, gone, layers, loss_of, same_parameters, snapshot, unchanged

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

OVERFLOWS = (3, 4, 8)
"""Batches whose loss is multiplied until float16 activations' gradients overflow."""


def scaler(**arguments) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2, **arguments)


def half_loss(model, batch: torch.Tensor, number: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(batch)
    loss = out.float().pow(2).mean()
    return loss * 1e7 if number in OVERFLOWS else loss


def unguarded(loss: torch.Tensor) -> torch.Tensor:
    return loss


def run(
    model, optimizer, scale, backward, *, clip=None, clipping: str = "exact", accumulation: int = 1, unscales: bool = False
) -> list[float]:
    """The loop of torch's documentation; returns the history of the scale."""
    history = []
    for number, batch in enumerate(batches(12)):
        backward(half_loss(model, batch, number) / accumulation)
        if (number + 1) % accumulation:
            continue
        if unscales or clip is not None:
            scale.unscale_(optimizer)
        if clip is not None:
            parameters = list(model.parameters())
            for together in [parameters] if clipping == "exact" else [[p] for p in parameters]:
                torch.nn.utils.clip_grad_norm_(together, clip)
        before = snapshot(model, optimizer)
        scale.step(optimizer)
        if number in OVERFLOWS and accumulation == 1:
            assert unchanged(before, snapshot(model, optimizer))
        scale.update()
        optimizer.zero_grad()
        history.append(scale.get_scale())
    return history


def plain_run(optimizer_class=StableAdamW, **arguments):
    model = layers()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    scale = scaler()
    history = run(model, optimizer, scale, lambda loss: scale.scale(loss).backward(), **arguments)
    assert len(set(history)) >= 3  # it grew and it backed off
    return model, optimizer, history


@pytest.mark.parametrize("guard_inside", [True, False])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_guard_equals_the_plain_scaler_bit_for_bit_overflows_included(optimizer_class, guard_inside: bool) -> None:
    plain, plain_optimizer, history = plain_run(optimizer_class)
    model = layers()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    scale = scaler()
    release = release_gradients(model, optimizer, scaler=scale)

    def backward(loss: torch.Tensor) -> None:
        before = snapshot(model, optimizer)
        (scale.scale(release.guard(loss)) if guard_inside else release.guard(scale.scale(loss))).backward()
        assert gone(model.parameters())
        assert release.ledger.live == 0
        overflowed.append(unchanged(before, snapshot(model, optimizer)))

    overflowed: list[bool] = []
    assert run(model, optimizer, scale, backward, unscales=guard_inside) == history
    assert [number for number, overflow in enumerate(overflowed) if overflow] == list(OVERFLOWS)
    assert unchanged(snapshot(plain, plain_optimizer), snapshot(model, optimizer))
    assert release.skipped == len(OVERFLOWS)
    assert release.ledger.peak == 8 * 8 * 4


@pytest.mark.parametrize("keep_bytes", [300, 10**6])
def test_gradients_kept_between_the_passes_change_nothing(keep_bytes: int) -> None:
    plain, plain_optimizer, history = plain_run()
    model = layers()
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    scale = scaler()
    release = release_gradients(model, optimizer, scaler=scale, keep_bytes=keep_bytes)
    assert run(model, optimizer, scale, lambda loss: scale.scale(release.guard(loss)).backward()) == history
    assert unchanged(snapshot(plain, plain_optimizer), snapshot(model, optimizer))
    assert release.ledger.live == 0
    assert release.ledger.peak <= keep_bytes + 8 * 8 * 4


@pytest.mark.parametrize("accumulation", [1, 3])
def test_held_gradients_and_the_scaler_bit_for_bit(accumulation: int) -> None:
    """The scaler unscales and judges what is held; a group in which one micro-batch overflows is dropped whole."""
    for max_norm in (None, 0.05):
        plain, _, history = plain_run(accumulation=accumulation, clip=max_norm)
        model = layers()
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        scale = scaler()
        asked = []
        release = release_gradients(
            model, optimizer, scaler=scale, accumulation="hold", max_norm=max_norm, sync=lambda asked=asked: not asked
        )
        backward = lambda loss, scale=scale, release=release: scale.scale(release.guard(loss)).backward()  # noqa: E731
        assert run(model, optimizer, scale, backward, accumulation=accumulation) == history
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b) if max_norm is None else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "declared_clip_stays"), [({}, False), ({}, True), ({"clipping": "per_tensor"}, False)], ids=str
)
def test_scaler_and_clipping_together_equal_the_plain_loop(options: dict, declared_clip_stays: bool) -> None:
    plain, _, history = plain_run(clip=0.05, **options)
    model = layers()
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    scale = scaler()
    release = release_gradients(model, optimizer, scaler=scale, max_norm=0.05, **options)
    clip = 0.05 if declared_clip_stays else None
    assert run(model, optimizer, scale, lambda loss: scale.scale(release.guard(loss)).backward(), clip=clip) == history
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_disabled_scaler_is_none() -> None:
    models = [layers(), layers()]
    for number, model in enumerate(models):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scale = scaler(enabled=False)
        if number:
            release_gradients(model, optimizer, scaler=scale)
        for batch in batches(3):
            scale.scale(model(batch).pow(2).mean()).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    assert same_parameters(*models)


@pytest.mark.parametrize("clears", [False, True])
def test_an_overflow_leaves_nothing_behind(clears: bool) -> None:
    """Neither step() nor optimizer.zero_grad() is called after it; the next backward is as good as any."""
    models = [layers(), layers()]
    for number, model in enumerate(models):
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        scale = scaler()
        release = release_gradients(model, optimizer, scaler=scale) if number else None
        for i in range(6):
            loss = half_loss(model, batches(6)[i], i)
            scale.scale(release.guard(loss) if release else loss).backward()
            scale.step(optimizer)
            scale.update()
            if clears or not release or i not in OVERFLOWS:
                model.zero_grad()
        assert scale.get_scale() < 2.0**10
    assert same_parameters(*models)


def test_a_scaled_norm_beyond_float32_is_no_overflow() -> None:
    """Every element is finite, scale times norm is not: the step is taken, as by the plain loop."""
    models = [layers(), layers()]
    for number, model in enumerate(models):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        release = release_gradients(model, optimizer, scaler=scale) if number else None
        for p in model.parameters():
            p.register_hook(lambda g: torch.full_like(g, 3e38))
        loss = model(batches(1)[0]).pow(2).mean()
        scale.scale(release.guard(loss) if release else loss).backward()
        if release:
            assert all(p.grad.norm() == torch.finfo(torch.float32).max for p in model.parameters())
        before = snapshot(model, optimizer)
        scale.step(optimizer)
        scale.update()
        assert scale.get_scale() == 2.0**100
        assert number or not unchanged(before, snapshot(model, optimizer))
        optimizer.zero_grad()
    assert same_parameters(*models)


def test_overflow_gives_other_leaves_what_the_plain_backward_would() -> None:
    """A head with an optimizer of its own, under the same scaler, finds its gradients there."""
    found = []
    for released in (False, True):
        model, head = layers(2), torch.nn.Linear(8, 2)
        torch.nn.init.ones_(head.weight)
        torch.nn.init.zeros_(head.bias)
        optimizer, other = AdamW(model.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
        scale = scaler()
        release = release_gradients(model, optimizer, scaler=scale) if released else None
        model[0][0].weight.register_hook(lambda g: g * float("inf"))
        loss = head(model(batches(1)[0])).pow(2).mean()
        scale.scale(release.guard(loss) if release else loss).backward()
        found.append(head.weight.grad.clone())
        scale.step(optimizer)
        scale.step(other)
        scale.update()
        found.append(head.weight.detach().clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_second_guarded_backward_after_an_overflow_changes_nothing() -> None:
    model = torch.nn.ModuleList([layers(2, seed=1), layers(2, seed=2)])
    optimizer = AdamW(model.parameters())
    scale = scaler()
    release = release_gradients(model, optimizer, scaler=scale)
    before = snapshot(model, optimizer)
    scale.scale(release.guard(half_loss(model[0], batches(1)[0], OVERFLOWS[0]))).backward()
    with pytest.raises(RefusedError, match="second guarded backward"):
        scale.scale(release.guard(half_loss(model[1], batches(1)[0], 0))).backward()
    scale.step(optimizer)
    scale.update()
    assert unchanged(before, snapshot(model, optimizer))
    assert scale.get_scale() == 2.0**8


def test_an_undeclared_scaler_that_skips_an_overflow_is_told_that_it_was_used() -> None:
    model = layers(2)
    optimizer = AdamW(model.parameters())
    scale = scaler()
    release_gradients(model, optimizer)
    model[0][0].weight.register_hook(lambda g: g * float("inf"))
    scale.scale(half_loss(model, batches(1)[0], 0)).backward()
    with pytest.raises(RefusedError, match=r"unscaling .*comes too late.*scaler="):
        scale.step(optimizer)
    with pytest.raises(RefusedError, match=r"to be skipped.*used already.*scaler="):
        optimizer.zero_grad()
    optimizer.zero_grad()


def test_the_norm_after_step_includes_parameters_outside_the_model() -> None:
    model, outside = layers(2), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), outside])
    scale = scaler()
    release = release_gradients(model, optimizer, scaler=scale)
    loss = loss_of(model, batches(1)[0]) + outside.sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters(), outside], retain_graph=True)])
    scale.scale(release.guard(loss)).backward()
    scale.step(optimizer)
    torch.testing.assert_close(release.last_norm.float(), expected.norm())


def test_a_guarded_backward_after_unscale_is_refused() -> None:
    """The scaler takes the gradient for judged, and would skip a step that backward() has taken."""
    model, (batch,) = layers(), batches(1)
    optimizer, scale = AdamW(model.parameters(), lr=1e-2), scaler()
    release = release_gradients(model, optimizer, scaler=scale)
    scale.scale(release.guard(loss_of(model, batch) * float("inf"))).backward()
    scale.unscale_(optimizer)
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"scaler\.unscale_.*Call scaler\.update"):
        scale.scale(release.guard(loss_of(model, batch))).backward()
    assert unchanged(before, snapshot(model, optimizer))
    assert gone(model.parameters())
    scale.update()
    scale.scale(release.guard(loss_of(model, batch))).backward()
    scale.step(optimizer)
    assert not unchanged(before, snapshot(model, optimizer))
