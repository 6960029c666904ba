"""After backward the true norm is where trainers look for it; it is never taken for a gradient, and rescaling it raises."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.torch_support import batches, gone, layers, loss_of, same_parameters, snapshot, train, unchanged
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import Refused
from penstock.torch_frontend import AdamW, StableAdamW, prepare_for_gradient_release, release_gradients

EVERY_WAY = {
    "one pass": {},
    "guard": {"max_norm": 0.05},
    "guard, kept": {"max_norm": 0.05, "keep_bytes": 500},
    "per tensor": {"max_norm": 0.05, "clipping": "per_tensor"},
    "last micro-batch": {"accumulation": "hold", "sync": lambda: True},
}


def true_norm(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in gradients]))


@pytest.mark.parametrize("arguments", EVERY_WAY.values(), ids=EVERY_WAY)
def test_the_true_norm_is_in_last_norm_and_on_the_smallest_parameter(arguments) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, **arguments)
    assert release.last_norm is None
    for batch in batches(3):
        expected = true_norm(model, batch)
        release.guard(loss_of(model, batch)).backward()
        torch.testing.assert_close(release.last_norm, expected, rtol=1e-6, atol=0)
        assert release.last_norm.shape == ()
        carriers = [p for p in model.parameters() if p.grad is not None]
        assert [p.shape for p in carriers] == [(8,)]
        assert gone(model.parameters())
        # What trainers log: the norm that clipping reports. A clip above the norm, and the declared one, change nothing.
        reported = clip_grad_norm_(model.parameters(), arguments.get("max_norm", 1e6) if "clipping" not in arguments else 1e6)
        torch.testing.assert_close(reported.double(), expected, rtol=1e-6, atol=0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()


def test_the_declared_clip_may_be_repeated() -> None:
    """torch adds 1e-6 to the norm, so that each of the first two clips of a small norm takes a little."""
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, max_norm=1e-3)
    for repeats, batch in enumerate(batches(4)):
        release.guard(loss_of(model, batch)).backward()
        for _ in range(repeats):
            clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def test_held_gradients_are_real_and_their_norm_is_known_after_step() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, accumulation="hold")
    expected = true_norm(model, batches(1)[0])
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    torch.testing.assert_close(release.last_norm, expected, rtol=1e-6, atol=0)


def test_a_parameter_that_only_an_earlier_micro_batch_used_is_part_of_the_norm() -> None:
    model, extra = layers(2), nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), extra])
    now = {"last": False}
    release = release_gradients(
        nn.ParameterList([*model.parameters(), extra]), optimizer, accumulation="hold", sync=lambda: now["last"]
    )
    extra.pow(2).sum().backward()
    now["last"] = True
    loss_of(model, batches(1)[0]).backward()
    plain = layers(2)
    loss_of(plain, batches(1)[0]).backward()
    expected = torch.cat([torch.full((3,), 2.0), *(p.grad.flatten() for p in plain.parameters())]).norm()
    torch.testing.assert_close(clip_grad_norm_([*model.parameters(), extra], 1e6), expected)
    optimizer.step()
    torch.testing.assert_close(release.last_norm.float(), expected)


RESCALINGS = {
    "clipping": lambda model: clip_grad_norm_(model.parameters(), 1e-3),
    "in place": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "through .data": lambda model: [p.grad.data.div_(4) for p in model.parameters() if p.grad is not None],
    "replaced": lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters() if p.grad is not None],
    "elsewhere": lambda model: [p.grad[1:].add_(1.0) for p in model.parameters() if p.grad is not None],
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
}


@pytest.mark.parametrize("rescale", RESCALINGS.values(), ids=RESCALINGS)
@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.05}], ids=["one pass", "guard"])
def test_rescaling_that_nobody_declared_raises_at_step(rescale, arguments) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, **arguments)
    release.guard(loss_of(model, batches(1)[0])).backward()
    before = snapshot(model, optimizer)
    rescale(model)
    with pytest.raises(Refused, match=r"rescaled between backward.*max_norm=|set by hand"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    train(model, optimizer, batches(1), loss=release.guard)


def test_an_undeclared_scaler_raises_at_the_first_step() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    scale = torch.amp.GradScaler("cpu", init_scale=4.0)
    release_gradients(model, optimizer)
    scale.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(Refused, match=r"loss scaling as scaler="):
        scale.step(optimizer)


def test_gradients_that_are_set_to_none_are_nothing_to_complain_about() -> None:
    models = [layers(), layers()]
    for number, model in enumerate(models):
        optimizer = StableAdamW(model.parameters())
        if number:
            release_gradients(model, optimizer)
        for batch in batches(3):
            loss_of(model, batch).backward()
            if number:
                model.zero_grad()
            optimizer.step()
            model.zero_grad()
    assert same_parameters(*models)


@pytest.mark.parametrize("head", [False, True])
def test_it_makes_way_for_real_gradients_under_reentrant_checkpointing(head: bool) -> None:
    """A pass inside the pass ends before all gradients are there, and publishes what it has, on any of the parameters."""
    for smallest in range(4):
        models = []
        for released in (False, True):
            model = nn.Sequential(*[nn.Linear(8, 8, bias=i == smallest) for i in range(4)])
            with torch.no_grad():
                for number, p in enumerate(model.parameters()):
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
            optimizer = StableAdamW(model.parameters(), lr=1e-2)
            release = release_gradients(model, optimizer) if released else None
            for batch in batches(3):
                x = batch.clone().requires_grad_()
                for layer in model[:-1]:
                    x = checkpoint(layer, x, use_reentrant=True)
                x = model[-1](x) if head else checkpoint(model[-1], x, use_reentrant=True)
                x.pow(2).mean().backward()
                norm = clip_grad_norm_(model.parameters(), 1e9)
                if release:
                    torch.testing.assert_close(release.last_norm.float(), norm)
                optimizer.step()
                optimizer.zero_grad()
            models.append((model, norm))
        assert same_parameters(models[0][0], models[1][0])
        torch.testing.assert_close(models[0][1], models[1][1])


def test_a_paused_backward_finds_no_published_norm_in_its_gradients() -> None:
    model, other = layers(), layers()
    optimizer = AdamW(model.parameters(), lr=0.0)
    release = release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    loss_of(other, batches(1)[0]).backward()
    with release.paused():
        loss_of(model, batches(1)[0]).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_published_is_finite_unless_the_gradient_is_not() -> None:
    model = layers(2, dtype=torch.float16)
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer)
    handles = [p.register_hook(lambda g: torch.full_like(g, 6e4)) for p in model.parameters()]
    loss_of(model, batches(1, dtype=torch.float16)[0]).backward()
    assert float(release.last_norm) > torch.finfo(torch.float16).max
    assert [float(p.grad[0]) for p in model.parameters() if p.grad is not None] == [torch.finfo(torch.float16).max]
    optimizer.step()
    for handle in handles:
        handle.remove()
    model[0][0].weight.register_hook(lambda g: g * float("nan"))
    loss_of(model, batches(1, dtype=torch.float16)[0]).backward()
    assert [float(p.grad[0]) for p in model.parameters() if p.grad is not None] == [float("inf")]
    clip_grad_norm_(model.parameters(), 1.0)  # of a norm that is infinite anyway
    optimizer.step()


def test_the_carrier_is_of_the_widest_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 8))
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    model[1](model[0](batches(1, dtype=torch.bfloat16)[0]).float()).pow(2).mean().backward()
    assert model[1].bias.grad is not None
    assert gone(model.parameters())


def test_where_no_norm_can_be_known_none_is_shown() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, accumulation="state")
    loss_of(model, batches(1)[0]).backward()
    assert release.last_norm is None
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    release.remove()
    lenient = AdamW(model.parameters(), gradient_release=True)
    prepare_for_gradient_release(model, lenient)
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())


def test_remove_takes_it_away() -> None:
    model = layers()
    release = release_gradients(model, AdamW(model.parameters()))
    loss_of(model, batches(1)[0]).backward()
    release.remove()
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_it_goes_when_the_optimizer_goes() -> None:
    """Nobody is left then who would know that it is no gradient."""
    model = layers()
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    assert any(p.grad is not None for p in model.parameters())
    del optimizer
    gc.collect()
    assert all(p.grad is None and len(p._backward_hooks) == 1 for p in model.parameters())  # that of the release
