"""A backward under release has updated parameters: a loop that then leaves the step out is told so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from tests.support.torch_models import batches, layers, same_parameters, snapshot, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, Release, release_gradients

WITHOUT_STEP = r"zero_grad\(\) without optimizer.step\(\).*release.paused\(\)"
CLEARED = r"parameter '.*': its gradient was cleared before optimizer.step\(\).*release.paused\(\)"


def released(**arguments: object) -> tuple[nn.Module, AdamW, Release]:
    model = layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, release_gradients(model, optimizer, **arguments)


def loss_of(model: nn.Module) -> Tensor:
    return model(batches(1)[0]).pow(2).mean()


@pytest.mark.parametrize(
    "arguments", [{}, {"max_norm": 1.0}, {"accumulation": "hold", "sync": lambda: True}], ids=["plain", "guard", "hold"]
)
def test_zero_grad_after_backward_without_step_raises_once(arguments: dict[str, object]) -> None:
    model, optimizer, release = released(**arguments)
    release.guard(loss_of(model)).backward()
    with pytest.raises(RefusedError, match=WITHOUT_STEP):
        optimizer.zero_grad()
    optimizer.zero_grad()
    release.guard(loss_of(model)).backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpointed(model: nn.Module) -> Tensor:
    x = batches(1)[0].requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    return x.pow(2).mean()


def test_zero_grad_without_step_raises_if_all_layers_are_behind_reentrant_checkpoints() -> None:
    model, optimizer, _ = released()
    for fails in (False, True):
        handle = model[0].register_forward_pre_hook(lambda *_: 1 // 0 if torch.is_grad_enabled() else None) if fails else None
        if fails:
            with pytest.raises(ZeroDivisionError):  # at the first layer, which is computed last
                checkpointed(model).backward()
            optimizer.zero_grad()
            handle.remove()
        else:
            checkpointed(model).backward()
            with pytest.raises(RefusedError, match=WITHOUT_STEP):
                optimizer.zero_grad()
    checkpointed(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_generator_loss_through_a_released_discriminator_raises() -> None:
    """The textbook loop: the generator's loss goes back through the discriminator, whose gradients are then cleared."""
    generator, (discriminator, optimizer, release) = layers(), released()
    for pause in (True, False):
        loss = loss_of(nn.Sequential(generator, discriminator))
        if pause:
            before = [p.clone() for p in discriminator.parameters()]
            with release.paused():
                loss.backward()
            optimizer.zero_grad()
            assert all(torch.equal(p, old) for p, old in zip(discriminator.parameters(), before, strict=True))
        else:
            loss.backward()
            with pytest.raises(RefusedError, match=WITHOUT_STEP):
                optimizer.zero_grad()


CLEARINGS: dict[str, Callable[[nn.Module], None]] = {
    "model.zero_grad()": lambda model: model.zero_grad(),
    "p.grad = None": lambda model: setattr(next(model.parameters()), "grad", None),
}


@pytest.mark.parametrize("paused", ["", "before", "between"])
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_gradients_cleared_before_step_raise_in_step(clear: Callable[[nn.Module], None], paused: str) -> None:
    model, optimizer, release = released()
    for when in ("before", "backward", "between"):
        with release.paused() if when == paused else contextlib.nullcontext():
            if when == "backward":
                loss_of(model).backward()
    clear(model)
    with pytest.raises(RefusedError, match=CLEARED):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("where", ["backward", "step"])
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_gradients_cleared_while_they_are_in_the_moments_raise_once(clear, where: str, sync: bool) -> None:
    """At the next backward() or step(); the next call goes on with what is in the moments. paused() clears nothing."""
    last = [False]
    model, optimizer, release = released(accumulation="state", sync=(lambda: last[0]) if sync else None)
    for clears in (False, True):
        last[0] = False
        loss_of(model).backward()
        with release.paused():
            loss_of(model[0]).backward()
        last[0] = not clears or where == "step"
        loss_of(model).backward()
        if clears:
            clear(model)
            before = snapshot(model, optimizer)
            with pytest.raises(RefusedError, match=r"cleared before optimizer.step\(\).*the optimizer's moments.*once more"):
                loss_of(model).backward() if where == "backward" else optimizer.step()
            assert unchanged(before, snapshot(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("accumulation", [None, "hold"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5), "lr of parameter group 0 changed"),
        (lambda model, optimizer: model[1][0].weight.mul_(0.9), "'1.0.weight'.*written between backward"),
        (lambda model, optimizer: model.zero_grad(), CLEARED),
    ],
    ids=["a setting", "a write", "cleared"],
)
@torch.no_grad()
def test_remove_in_mid_step_refuses_what_step_refuses(change, said: str, accumulation: str | None) -> None:
    """It counts as the step of what backward() has updated."""
    model, optimizer, release = released(accumulation=accumulation, sync=accumulation and (lambda: True))
    with torch.enable_grad():
        loss_of(model).backward()
    change(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=said):
        release.remove()
    assert optimizer.release is release
    assert unchanged(before, snapshot(model, optimizer))
    with contextlib.suppress(RefusedError):  # "without optimizer.step()"
        optimizer.zero_grad()
    release.remove()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "decay": lambda p: p.mul_(0.9),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "perturbation": lambda p: p.add_(1e-3),
    "zeros": lambda p: p[0].zero_(),
}


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1.0}, {"accumulation": "hold", "sync": lambda: True}])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_a_parameter_written_between_backward_and_step_raises_in_step(write, arguments: dict[str, object]) -> None:
    """Without release the update comes after the write."""
    model, optimizer, release = released(**arguments)
    for early in (False, True, False):
        with torch.enable_grad():
            release.guard(loss_of(model)).backward()
        if early:
            write(model[1][0].weight)
            with pytest.raises(RefusedError, match=r"'1.0.weight'.*written between backward\(\).*after optimizer.step\(\)"):
                optimizer.step()
        else:
            optimizer.step()
            write(model[1][0].weight)
        optimizer.zero_grad()


def test_a_failed_backward_is_closed_by_zero_grad() -> None:
    model, optimizer, _ = released()

    def fail(*_: object) -> None:
        raise ValueError("planted")

    output = model[0](batches(1)[0])
    output.register_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        model[1:](output).pow(2).mean().backward()
    optimizer.zero_grad()


def test_a_refused_second_backward_is_closed_by_zero_grad() -> None:
    model, optimizer, _ = released()
    loss_of(model).backward()
    with pytest.raises(RefusedError, match="second backward"):
        loss_of(model).backward()
    optimizer.zero_grad()


def test_a_step_with_a_paused_backward_in_it_is_a_plain_step() -> None:
    (model, optimizer, release), plain = released(), layers()
    reference = AdamW(plain.parameters(), lr=1e-2)
    for paused in (True, False, True):
        loss_of(model).backward()
        loss_of(plain).backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        if paused:
            with release.paused():
                loss_of(model).backward()
            optimizer.zero_grad()
    assert same_parameters(model, plain)
