"""Under release: small tensors share a launch of the kernels, and the device leaves out what is not finite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.rows import covering
from tests.support.torch_models import (
    ADAM_FAMILY,
    backend_of,
    batches,
    bits,
    loss_of,
    slot_of,
    snapshot,
    spoil,
    train,
    unchanged,
)
from tests.support.triton_launches import watched
from torch import nn

from penstock.torch_frontend import StableAdamW, release_gradients

WIDTH = 48


def blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two matrices and six vectors, of which four find room to wait."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(2)])
    return model.to(dtype)


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of the kernels that were launched."""
    names: list[str] = []
    with watched(names.append):
        yield names


@pytest.mark.parametrize(("optimizer_class", "dtype"), covering(ADAM_FAMILY, [torch.float32, torch.bfloat16]))
def test_release_equals_step_bit_for_bit_in_one_launch_for_a_few_small_tensors(optimizer_class, dtype, launched) -> None:
    found = []
    for released in (False, True):
        model = blocks(dtype)
        optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1, backend="triton")
        if released:
            launched.clear()
            release_gradients(model, optimizer)
        train(model, optimizer, batches(2, WIDTH, dtype=dtype))
        found.append(snapshot(model, optimizer))
    assert unchanged(*found)
    assert sorted(launched[: len(launched) // 2]) == ["update_group"] * 2 + ["update_tensor"] * 2


@pytest.mark.parametrize(("optimizer_class", "dtype"), covering(ADAM_FAMILY, [torch.float32, torch.bfloat16]))
def test_an_update_measures_the_gradient_in_its_own_launch(optimizer_class, dtype, launched, monkeypatch) -> None:
    """Of an item, of more, and of none; as given, whatever maximize and L2 make of it; and the same bits are written."""
    for size in (1100, 5, 0):
        found = []
        for measure in (True, False):
            p = torch.linspace(-1, 1, size).to(dtype).requires_grad_()
            gradient = torch.linspace(-2, 3, size).to(dtype)
            optimizer = optimizer_class([p], weight_decay=0.1, maximize=True, backend="triton")
            launched.clear()
            with torch.no_grad():
                square = backend_of(optimizer).update(slot_of(optimizer, p), gradient, first=True, measure=measure)
            assert launched == ["update_tensor"] * bool(size)
            if measure:
                assert square.dtype is torch.float32
                torch.testing.assert_close(square.double(), gradient.double().square().sum(), rtol=1e-6, atol=0.0)
            else:
                assert square is None
            found.append([bits(x) for x in (p, *optimizer.state[p].values())])
        assert unchanged(*found)


@pytest.mark.parametrize(("optimizer_class", "dtype"), covering(ADAM_FAMILY, [torch.float32, torch.bfloat16]))
def test_released_gradients_are_measured_in_the_launches_that_update_them(optimizer_class, dtype, monkeypatch) -> None:
    """Matrices, which are launched by themselves, and vectors, which are queued; and the same bits are written."""
    found, norms = [], []
    for released in (False, True):
        model = blocks(dtype)
        optimizer = optimizer_class(model.parameters(), lr=1e-2, backend="triton")
        if released:
            release_gradients(model, optimizer)
            for name in ("square_sum", "square_sums"):
                monkeypatch.setattr(f"penstock.torch_frontend.release.stages.{name}", None)
        loss_of(model, batches(1, WIDTH, dtype=dtype)[0]).backward()
        norms.append([(p.grad if released else p.grad.double()).norm().double() for p in model.parameters()])
        optimizer.step()
        found.append(snapshot(model, optimizer))
    assert unchanged(*found)
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-6, atol=0.0)


def test_a_queued_gradient_has_its_norm_before_its_update() -> None:
    model = blocks()
    optimizer = StableAdamW(model.parameters(), lr=1e-2, backend="triton")
    release = release_gradients(model, optimizer)
    seen: list[torch.Tensor] = []
    before = model[1][1].bias.detach().clone()
    model[1][0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.extend((model[1][1].bias.grad.norm(), release.last_norm, model[1][1].bias.detach().clone()))
    )
    loss_of(model, batches(1, WIDTH)[0]).backward()
    norm, total, then = seen
    assert torch.equal(before, then)
    assert not torch.equal(before, model[1][1].bias)
    assert 0 < norm < total < release.last_norm
    torch.testing.assert_close(norm, model[1][1].bias.grad.norm())
    optimizer.step()


@pytest.mark.parametrize(("optimizer_class", "dtype"), covering(ADAM_FAMILY, [torch.float32, torch.bfloat16]))
def test_of_many_tensors_those_are_updated_whose_own_gradient_is_finite(optimizer_class, dtype: torch.dtype, launched) -> None:
    """The same bits as one by one; an empty tensor counts as updated."""
    sizes, bad = (1100, 3, 0, 17, 1030), {0: float("inf"), 3: float("nan")}
    generator = torch.Generator().manual_seed(0)
    values, given = ([torch.randn(size, generator=generator).to(dtype) for size in sizes] for _ in range(2))
    results = []
    for each in (True, False):
        parameters = [value.clone().requires_grad_() for value in values]
        optimizer = optimizer_class(parameters, lr=1e-2, weight_decay=0.1, capturable=True, backend="triton")
        gradients = [gradient.clone() for gradient in given]
        with torch.no_grad():
            for spoiled in ({}, bad):
                for position, value in spoiled.items():
                    gradients[position][-1] = value
                pairs = [(slot_of(optimizer, p), gradient) for p, gradient in zip(parameters, gradients, strict=True)]
                launched.clear()
                if each:
                    applied = backend_of(optimizer).update_each_if_finite(pairs)
                    assert launched == ["store_bias_corrections", "update_group", "update_group"]
                else:
                    applied = [backend_of(optimizer).update_if_finite(*pair) for pair in pairs]
                assert [float(flag) for flag in applied] == [float(i not in spoiled) for i in range(len(sizes))]
                for (slot, _), flag in zip(pairs, applied, strict=True):
                    slot.state["step"] += flag
        results.append([bits(x) for p in parameters for x in (p, *optimizer.state[p].values())])
        for scratch in backend_of(optimizer)._scratch._by_stream.values():
            assert torch.count_nonzero(scratch.counters(1)) == 0
    assert unchanged(*results)


def test_nonfinite_gradients_are_skipped_one_by_one_as_by_the_host() -> None:
    """A matrix, launched by itself, and vectors that share a launch."""
    found = []
    for backend, capturable in (("eager", True), ("triton", True), ("triton", False)):
        model = blocks()
        optimizer = StableAdamW(model.parameters(), lr=1e-2, on_nonfinite="skip", capturable=capturable, backend=backend)
        release = release_gradients(model, optimizer)
        train(model, optimizer, batches(1, WIDTH))
        spoil(model[0][0].weight)
        spoil(model[1][1].bias)
        for batch in batches(2, WIDTH, seed=2):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert release.skipped == optimizer.skipped == 4
        found.append(model)
        assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [1, 3, 3, 3, 3, 3, 3, 1]
    for other in found[1:]:
        for p, q in zip(found[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_held_gradients_are_skipped_together() -> None:
    model = blocks()
    optimizer = StableAdamW(model.parameters(), lr=1e-2, on_nonfinite="skip", capturable=True, backend="triton")
    release = release_gradients(model, optimizer, accumulation="hold", max_norm=1.0)
    train(model, optimizer, batches(1, WIDTH))
    before = snapshot(model, optimizer)
    spoil(model[0][1].bias)
    train(model, optimizer, batches(1, WIDTH, seed=2))
    assert unchanged(before, snapshot(model, optimizer))
    assert release.skipped == optimizer.skipped == 1
    assert release.ledger.live == 0
