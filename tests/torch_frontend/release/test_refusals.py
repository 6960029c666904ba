"""What release cannot do exactly it refuses, before anything changes, and says what to do instead."""

from __future__ import annotations

import pytest
import torch
from tests.support.torch_models import batches, layers, loss_of, snapshot, train, unchanged

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, Lion, StableAdamW, release_gradients


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_two_forwards_then_two_backwards_raises_as_in_plain_torch(backend: str) -> None:
    model = layers(2)
    optimizer = StableAdamW(model.parameters(), backend=backend)
    release_gradients(model, optimizer)
    first, second = (loss_of(model, batch) for batch in batches(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_setting_changed_too_late_raises_at_step() -> None:
    for name, value in {"lr": 0.5, "betas": (0.5, 0.5), "weight_decay": 0.3}.items():
        model = layers()
        optimizer = AdamW(model.parameters())
        release_gradients(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        before = snapshot(model, optimizer)
        optimizer.param_groups[0][name] = value
        with pytest.raises(RefusedError, match=rf"{name} of parameter group 0.*after optimizer\.step"):
            optimizer.step()
        assert unchanged(before, snapshot(model, optimizer))
    lr = torch.tensor(0.1)
    optimizer = AdamW(layers().parameters(), lr=lr)
    model = layers()
    optimizer = AdamW(model.parameters(), lr=lr)
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    lr.mul_(0.5)
    with pytest.raises(RefusedError, match="lr of parameter group 0"):
        optimizer.step()


def test_gradients_set_by_hand_after_the_update_are_refused() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    model[0][0].weight.grad = torch.ones(8, 8)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"'0\.0\.weight'.*set by hand.*already updated"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))


def test_micro_batches_in_the_moments_are_not_lost() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer, accumulation="state")
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RefusedError, match=r"step\(\) before"):
        optimizer.zero_grad()
    with pytest.raises(RefusedError, match=r"step\(\) before remove"):
        release.remove()
    optimizer.step()
    release.remove()


def test_paused_after_the_update_says_what_to_do() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release = release_gradients(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    with release.paused():
        loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RefusedError, match=r"Call optimizer\.step\(\) before such a gradient"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, batches(1))


def test_betas_changed_between_micro_batches_raise() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer, accumulation="state")
    loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.5  # not used yet
    optimizer.step()
    loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    with pytest.raises(RefusedError, match=r"betas of parameter group 0.*Set it back"):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()


def test_micro_batches_in_a_state_that_no_step_can_be_taken_from_are_refused() -> None:
    model = layers()
    optimizer = Lion(model.parameters(), gradient_release=True)
    before = snapshot(model, optimizer)
    with pytest.raises(RefusedError, match=r"this rule's step needs the whole gradient .*; use accumulation='hold' or"):
        release_gradients(model, optimizer, accumulation="state")
    with pytest.raises(RefusedError, match=r"'state' is not possible for lion, .*; call step\(\) after each backward"):
        optimizer.optimizer_accumulation = True
    assert unchanged(before, snapshot(model, optimizer))
