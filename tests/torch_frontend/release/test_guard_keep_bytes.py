"""keep_bytes: gradients that stay alive between the two passes of guard() are not computed again, and change nothing."""

from __future__ import annotations

import pytest
import torch
from tests.support.torch_models import (
    batches,
    gone,
    layers,
    loss_of,
    plain_and_released,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

WIDTH, DEPTH = 16, 8
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*arguments, **(options or {}))


def run(keep_bytes: int, **arguments):
    model = layers(DEPTH, WIDTH)
    optimizer = StableAdamW(model.parameters(), lr=1e-2, **arguments)
    release = release_gradients(model, optimizer, max_norm=0.05, keep_bytes=keep_bytes)
    with LiveGradientMeter(model.named_parameters()) as measured, Products() as products:
        train(model, optimizer, batches(3, WIDTH), loss=release.guard)
    return model, optimizer, release, measured.peak, products.count / 3


def test_the_second_pass_computes_only_what_was_not_kept() -> None:
    """A linear layer takes one product forward, and two backward: its input's gradient and its weight's."""
    model, optimizer, release, peak, products = run(0)
    forward, inputs, weights = DEPTH, DEPTH - 1, DEPTH
    assert products == forward + 2 * (inputs + weights)
    assert peak == release.ledger.peak <= LAYER_BYTES
    for kept in (1, 3, DEPTH - 1):
        other, its_optimizer, its_release, its_peak, its_products = run(kept * LAYER_BYTES)
        assert unchanged(snapshot(model, optimizer), snapshot(other, its_optimizer))
        assert its_products == products - kept
        assert kept * LAYER_BYTES < its_peak == its_release.ledger.peak <= (kept + 1) * LAYER_BYTES
        assert torch.equal(its_release.last_norm, release.last_norm)
    other, its_optimizer, its_release, its_peak, its_products = run(2 * DEPTH * LAYER_BYTES)  # all: there is no second pass
    assert unchanged(snapshot(model, optimizer), snapshot(other, its_optimizer))
    assert its_products == forward + inputs + weights
    assert its_peak == its_release.ledger.peak == DEPTH * LAYER_BYTES


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("keep_bytes", [LAYER_BYTES, 4 * LAYER_BYTES])
def test_keep_bytes_changes_nothing_under_either_checkpointing(reentrant: bool, frozen: bool, keep_bytes: int) -> None:
    """A reentrant checkpoint hides its parameters, and refuses a pass that leaves some out: nothing is kept then."""
    models = []
    for keep in (0, keep_bytes):
        model = layers(4, WIDTH)
        model[1].requires_grad_(not frozen)
        optimizer = StableAdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, max_norm=0.05, keep_bytes=keep)
        for batch in batches(3, WIDTH):
            x = model[0](batch)
            for layer in model[1:2]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            release.guard(model[2:](x).pow(2).mean()).backward()
            assert gone(model.parameters())
            assert x.grad_fn is not None
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert same_parameters(*models)


class RunsABackward(torch.autograd.Function):
    """Hides its parameters behind a backward pass of its own, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x.detach())

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), gradients)
        return x.grad, None


@pytest.mark.parametrize("keep_bytes", [0, LAYER_BYTES, 2 * LAYER_BYTES, 10 * LAYER_BYTES])
def test_hidden_parameters_are_updated_as_by_the_plain_loop(keep_bytes: int) -> None:
    def loop(model, optimizer, guard) -> None:
        for batch in batches(3, WIDTH):
            hidden = RunsABackward.apply(model[0](batch), model[1:3])
            guard(model[3](hidden).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert same_parameters(*plain_and_released(loop, AdamW, lambda: layers(4, WIDTH), max_norm=1e9, keep_bytes=keep_bytes))


def test_random_numbers_of_backward_are_drawn_as_without_keep_bytes() -> None:
    """By a part of the graph that a second pass for the rest would leave out, and by another."""

    def loop(keep_bytes: int) -> nn.Module:
        model = layers(2, WIDTH)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, max_norm=1e9, keep_bytes=keep_bytes)
        for batch in batches(3, WIDTH):
            outputs = [layer(batch) for layer in model]
            for output in outputs:
                output.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
            release.guard(sum(output.pow(2).mean() for output in outputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    models = []
    for keep_bytes in (0, LAYER_BYTES):
        torch.manual_seed(1)
        models.append(loop(keep_bytes))
    assert same_parameters(*models)


@pytest.mark.parametrize("keep_bytes", [0, LAYER_BYTES, 100 * LAYER_BYTES])
def test_other_leaves_get_their_gradient_once(keep_bytes: int) -> None:
    found = []
    for released in (False, True):
        model, head = layers(4, WIDTH), nn.Linear(WIDTH, 2)
        nn.init.ones_(head.weight)
        nn.init.zeros_(head.bias)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, max_norm=1e9, keep_bytes=keep_bytes) if released else None
        x = batches(1, WIDTH)[0].requires_grad_()
        for _ in range(2):
            loss = head(model(x)).pow(2).mean()
            (release.guard(loss) if release else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((x.grad, head.weight.grad, *model.parameters()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep_bytes", [0, LAYER_BYTES, 100 * LAYER_BYTES])
@pytest.mark.parametrize("spike", [False, True], ids=["used", "skipped"])
def test_retained_gradients_are_those_of_one_pass(keep_bytes: int, spike: bool) -> None:
    """Of the last output, and of one in the middle, to which another backward adds its own."""
    found = []
    for released in (False, True):
        model, retained = layers(4, WIDTH), []
        optimizer = AdamW(model.parameters(), lr=1e-2, on_nonfinite="skip")
        release = release_gradients(model, optimizer, max_norm=1e9, keep_bytes=keep_bytes) if released else None
        for batch in batches(2, WIDTH):
            middle = model[:2](batch)
            outputs = model[2:](middle)
            for tensor in (middle, outputs):
                tensor.retain_grad()
            retained += [middle, outputs]
            torch.autograd.backward(middle.sum(), inputs=[middle], retain_graph=True)
            loss = outputs.pow(2).mean() * (torch.inf if spike else 1.0)
            (release.guard(loss) if release else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*(tensor.grad for tensor in retained), *model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class FreesItsBuffer(torch.autograd.Function):
    """Can be gone through once."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.buffers = [x.clone()]
        return x * 2

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> torch.Tensor:
        ctx.buffers.pop()
        return gradients[0] * 2


def test_a_function_that_frees_its_own_buffers_is_explained() -> None:
    model = layers(2)
    release = release_gradients(model, AdamW(model.parameters()), max_norm=1.0)
    with pytest.raises(IndexError) as raised:
        release.guard(FreesItsBuffer.apply(model(batches(1)[0])).pow(2).mean()).backward()
    assert "second of the two passes of release.guard()" in raised.value.__notes__[0]
    assert "accumulation='hold'" in raised.value.__notes__[0]


def test_a_measuring_pass_that_fails_leaves_nothing_behind() -> None:
    def loop(model, optimizer, guard) -> None:
        train(model, optimizer, batches(1), loss=guard)
        if optimizer.release:
            before = snapshot(model, optimizer)
            handle = model[1][0].weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                guard(loss_of(model, batches(1)[0])).backward()
            handle.remove()
            assert unchanged(before, snapshot(model, optimizer))
            assert all(p.grad is None for p in model.parameters())
            assert optimizer.release.ledger.live == 0
        train(model, optimizer, batches(2), loss=guard)

    assert same_parameters(*plain_and_released(loop, max_norm=1e9, keep_bytes=400))
