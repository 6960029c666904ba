"""Micro-batched blocks give one gradient a parameter and backward: release does with it what it does with any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.torch_frontend.microbatch.models import Decoder, assert_equal_gradients, batch, decoder, loss_of
from torch import nn

from penstock.core.errors import RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, StableAdamW, microbatch_blocks, release_gradients

STEPS = 4


def train(
    model: nn.Module, optimizer: Any, *, guard: Any = lambda loss: loss, micro_batches: int = 1, clip: float | None = None
):
    for step in range(STEPS):
        for number in range(micro_batches):
            guard(loss_of(model, batch(seed=10 * step + number)) / micro_batches).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "micro_batches"),
    [
        ({}, 1),
        ({"max_norm": 0.05}, 1),
        ({"max_norm": 0.05, "keep_bytes": 3000}, 1),
        ({"accumulation": "hold"}, 3),
        ({"accumulation": "hold", "max_norm": 0.05}, 3),
        ({"accumulation": "state"}, 3),
        ({"max_norm": 0.05, "clipping": "per_tensor"}, 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_training_equals_undivided_training(settings: dict[str, Any], micro_batches: int) -> None:
    """Release against release for what is not the plain optimizer's arithmetic, and against the plain optimizer elsewhere."""
    plain, divided = decoder(), decoder()
    plain_optimizer = StableAdamW(plain.parameters(), lr=1e-2)
    optimizer = StableAdamW(divided.parameters(), lr=1e-2)
    if settings.get("accumulation") == "state" or settings.get("clipping") == "per_tensor":
        train(
            plain,
            plain_optimizer,
            guard=release_gradients(plain, plain_optimizer, **settings).guard,
            micro_batches=micro_batches,
        )
    else:
        train(plain, plain_optimizer, micro_batches=micro_batches, clip=settings.get("max_norm"))
    release = release_gradients(divided, optimizer, **settings)
    with microbatch_blocks(divided.layers, chunks=3):
        train(divided, optimizer, guard=release.guard, micro_batches=micro_batches)
    for name, expected in parameters(plain).items():
        # 1e-13 in a gradient, amplified by the division through sqrt(v) in each step, at lr 1e-2
        torch.testing.assert_close(parameters(divided)[name], expected, rtol=1e-9, atol=1e-10)


def test_live_gradients_are_those_of_the_largest_block_and_the_ledger_says_so() -> None:
    model = decoder(5)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    with microbatch_blocks(model.layers, chunks=3), LiveGradientMeter(model.named_parameters()) as meter:
        for seed in range(2):
            loss = loss_of(model, batch(seed=seed))
            meter.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    block = sum(parameter.numel() * parameter.element_size() for parameter in model.layers[0].parameters())
    head = sum(parameter.numel() * parameter.element_size() for parameter in model.head.parameters())
    assert meter.peak == release.ledger.peak
    assert block <= meter.peak <= block + head
    assert meter.live() == release.ledger.live == 0


def test_a_block_of_several_uses_and_tied_blocks_are_updated_once() -> None:
    def tied() -> Decoder:
        model = decoder(4)
        model.layers[1].wide.weight = model.layers[0].wide.weight
        model.layers[2] = model.layers[0]
        return model

    plain, model = tied(), tied()
    train(plain, AdamW(plain.parameters(), lr=1e-2))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    with microbatch_blocks(model.layers, chunks=3):
        train(model, optimizer)
    for name, expected in parameters(plain).items():
        torch.testing.assert_close(parameters(model)[name], expected, rtol=1e-9, atol=1e-10)


def test_two_forwards_and_then_two_backwards_raise_as_undivided() -> None:
    model = decoder()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    with microbatch_blocks(model.layers, chunks=3):
        first, second = loss_of(model, batch()), loss_of(model, batch())
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


def test_an_undeclared_second_backward_changes_nothing() -> None:
    model = decoder()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    with microbatch_blocks(model.layers, chunks=3):
        loss_of(model, batch()).backward()
        before = copy.deepcopy(parameters(model))
        with pytest.raises(RefusedError, match="second backward"):
            loss_of(model, batch()).backward()
    assert all(torch.equal(before[name], value) for name, value in parameters(model).items())


def test_an_error_in_a_chunk_leaves_its_block_alone_and_training_goes_on() -> None:
    """Blocks after it are updated already: as with any error in the middle of a released backward."""
    model = decoder()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2 + 2:  # in the second chunk that is computed again
            raise ValueError("out of luck")

    handle = model.layers[0].norm.register_forward_pre_hook(fail)
    with microbatch_blocks(model.layers, chunks=2):
        before = copy.deepcopy(parameters(model))
        with pytest.raises(ValueError, match="out of luck"):
            loss_of(model, batch()).backward()
        assert all(torch.equal(before[n], v) for n, v in parameters(model).items() if n.startswith("layers.0"))
        assert next(iter(model.layers[0].parameters())).is_leaf
        handle.remove()
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        optimizer.step()


def test_paused_leaves_the_whole_batch_gradient() -> None:
    model = decoder()
    loss_of(model, batch()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = release_gradients(model, optimizer)
    with microbatch_blocks(model.layers, chunks=3), release.paused():
        loss_of(model, batch()).backward()
    assert_equal_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
