"""A backward that fails while small gradients wait for a launch: nothing stale is used later."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.support.counting_backend import WIDTH, Counting, blocks, optimizer_of
from tests.support.torch_models import backend_of, batches, loss_of, snapshot, train, unchanged
from torch import Tensor, nn

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, prepare_for_gradient_release, release_gradients


def fail(gradient: Tensor) -> None:
    raise MemoryError("planted")


def fail_in_second_pass() -> Callable[[Tensor], None]:
    calls: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        calls.append(gradient)
        if len(calls) == 2:
            fail(gradient)

    return hook


def failed(released: Callable = release_gradients, backend: type = Counting, **options):
    """A model, its optimizer, its release and the parameters that wait, after a backward that failed at the first layer."""
    model = blocks()
    optimizer = optimizer_of(model, True, AdamW, backend, gradient_release=released is prepare_for_gradient_release)
    guard = getattr(released(model, optimizer, **options), "guard", lambda loss: loss)
    handle = model[0][0].weight.register_hook(fail if "max_norm" not in options else fail_in_second_pass())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(MemoryError, match="planted"):
        guard(loss_of(model, batches(1, WIDTH)[0])).backward()
    handle.remove()
    waiting = [p for p, old in zip(model.parameters(), before, strict=True) if p.ndim == 1 and torch.equal(p, old)]
    assert optimizer.release.ledger.live == sum(p.numel() * 4 for p in waiting) > 0
    return model, optimizer, optimizer.release, waiting


def test_zero_grad_discards_queued_gradients() -> None:
    model, optimizer, release, waiting = failed()
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    assert unchanged(before, snapshot(model, optimizer))
    assert release.ledger.live == 0
    assert all(p not in optimizer.state for p in waiting)
    train(model, optimizer, batches(2, WIDTH))
    assert release.ledger.live == 0


def test_restored_state_is_unchanged_after_a_failed_backward() -> None:
    """The model first, then the optimizer, which wants the step closed."""
    model, optimizer, _, _ = failed()
    saved = copy.deepcopy(blocks().state_dict())
    model.load_state_dict(saved)
    with pytest.raises(RefusedError, match="in the middle of a step"):
        optimizer.load_state_dict(AdamW(blocks().parameters()).state_dict())
    optimizer.zero_grad()
    optimizer.load_state_dict(AdamW(blocks().parameters(), lr=1e-2).state_dict())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_zero_grad_after_the_forward_recovers_from_a_failed_backward() -> None:
    model, optimizer, _, _ = failed()
    loss = loss_of(model, batches(1, WIDTH)[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_step_uses_queued_gradients_as_a_plain_step_would() -> None:
    model, optimizer, release, _ = failed()
    plain = blocks()
    other = optimizer_of(plain, False, AdamW)
    handle = plain[0][0].weight.register_hook(fail)
    with pytest.raises(MemoryError, match="planted"):
        loss_of(plain, batches(1, WIDTH)[0]).backward()
    handle.remove()
    for now in (optimizer, other):
        now.step()
        now.zero_grad()
    assert release.ledger.live == 0
    assert unchanged(snapshot(model, optimizer), snapshot(plain, other))


@pytest.mark.parametrize("by", ["remove", "with"])
def test_removing_the_release_puts_queued_gradients_into_grad(by: str) -> None:
    model, optimizer, release, waiting = failed()
    before = snapshot(model, optimizer)
    backend_of(optimizer).fails = True  # no launch, which may be what has failed
    if by == "remove":
        release.remove()
    else:
        with pytest.raises(ValueError, match="mine"), release:
            raise ValueError("mine")
    assert unchanged(before, snapshot(model, optimizer))
    assert [p for p in model.parameters() if p.grad is not None] == waiting
    assert optimizer.release is None


@pytest.mark.parametrize("call", ["state_dict", "deepcopy"])
def test_reading_state_after_a_failed_backward_is_refused_and_changes_nothing(call: str) -> None:
    model, optimizer, _, _ = failed()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RefusedError, match=r"is (queued|released)"):
        optimizer.state_dict() if call == "state_dict" else copy.deepcopy(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("released", [release_gradients, prepare_for_gradient_release])
def test_another_backward_is_refused_before_anything_changes(released: Callable) -> None:
    model, optimizer, release, _ = failed(released)
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, batches(1, WIDTH)[0])
    with pytest.raises(RefusedError, match=r"a backward\(\) has failed.*zero_grad|a second backward\(\)"):
        loss.backward(retain_graph=True)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    assert release.ledger.live == 0
    train(model, optimizer, batches(2, WIDTH))
    assert release.ledger.live == 0


def test_another_guarded_backward_is_refused_before_anything_changes() -> None:
    model, _, release, _ = failed(max_norm=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RefusedError, match="second guarded backward"):
        release.guard(loss_of(model, batches(1, WIDTH)[0])).backward()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_small_part_of_a_large_buffer_does_not_keep_it_alive() -> None:
    """The gradient of a part of a concatenation is a view."""

    class Prefixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prefix = nn.Parameter(torch.ones(1, WIDTH))
            self.layers = blocks()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(torch.cat([self.prefix, x]))

    model = Prefixed()
    optimizer = optimizer_of(model, True)
    release_gradients(model, optimizer)
    seen = []
    model.prefix.register_hook(lambda gradient: seen.append(gradient.untyped_storage().nbytes()))
    loss_of(model, batches(1, WIDTH)[0].repeat(20000 // WIDTH, 1)).backward()
    launches = backend_of(optimizer).launches
    assert seen[0] > 2**16
    assert launches[-2:] == [1, 4]  # by itself; then those that wait, at the end
