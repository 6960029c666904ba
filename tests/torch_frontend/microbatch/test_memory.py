"""What is alive, measured: one block's gradients, one chunk's activations, and every block's input."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.planner.live_storages import LiveStorageMeter
from penstock.torch_frontend import AdamW, microbatch_blocks, release_gradients

COUNT, WIDTH, BATCH, CHUNKS = 6, 64, 32, 8
SAMPLE = WIDTH * 4
ONE = 2 * WIDTH * WIDTH * 4
"""Bytes of one sample, and of one block's gradients."""


class Block(nn.Module):
    """Two matrices, with `extra` activations of the input's size between them."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        for _ in range(self.extra):
            x = x.sin()
        return self.two(x)


def blocks(extra: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(extra) for _ in range(COUNT)))


def peak(model: nn.Module, samples: int) -> int:
    """Bytes alive at most in a forward and backward, besides parameters and the batch."""
    x = torch.randn(samples, WIDTH)
    with LiveStorageMeter({"parameters": model.parameters()}) as meter:
        model(x).sum().backward()
    return meter.peak - meter.live["parameters"]


def test_the_gradients_of_one_block_are_alive() -> None:
    model = blocks()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with release_gradients(model, optimizer) as release, microbatch_blocks(model, chunks=CHUNKS):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        with LiveGradientMeter(model.named_parameters()) as meter:
            meter.watch(loss)
            loss.backward()
        assert meter.peak == release.ledger.peak == ONE
        assert meter.live() == release.ledger.live == 0
        optimizer.step()


def test_without_release_all_gradients_come_to_be_alive() -> None:
    model = blocks()
    with microbatch_blocks(model, chunks=CHUNKS), LiveGradientMeter(model.named_parameters()) as meter:
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        meter.watch(loss)
        loss.backward()
        assert meter.peak == COUNT * ONE


def test_the_sums_take_one_block_and_one_tensor() -> None:
    """While a block is computed again: its sums, one matrix's gradient of the chunk, and few activations."""
    model = blocks()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with microbatch_blocks(model, chunks=CHUNKS):
        found = peak(model, CHUNKS)
    assert ONE + ONE // 2 <= found <= ONE + ONE // 2 + (COUNT + 8) * CHUNKS * SAMPLE


def test_the_graph_keeps_the_blocks_input_and_nothing_else() -> None:
    model = blocks(extra=10)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def saved(samples: int) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = model(torch.randn(samples, WIDTH))
        del kept
        return sum(sizes.values())

    assert saved(BATCH) == COUNT * 12 * BATCH * SAMPLE
    with microbatch_blocks(model, chunks=CHUNKS):
        assert saved(BATCH) == COUNT * BATCH * SAMPLE


@pytest.mark.parametrize("extra", [4, 12])
def test_activations_inside_a_block_are_those_of_one_chunk(extra: int) -> None:
    """From CHUNKS chunks to one, only what is inside a block grows: by its activations of the rest of the batch."""
    model = blocks(extra)
    model.requires_grad_(False)
    x = torch.randn(1024, WIDTH, requires_grad=True)

    def measured(chunks: int) -> int:
        with microbatch_blocks(model, chunks=chunks), LiveStorageMeter() as meter:
            model(x).sum().backward()
        return meter.peak

    difference = measured(1) - measured(CHUNKS)
    expected = (extra + 1) * 1024 * SAMPLE * (CHUNKS - 1) // CHUNKS  # what sin and the linear layers keep
    assert abs(difference - expected) <= 3 * 1024 * SAMPLE  # temporaries of the whole batch on one side or the other


def test_less_is_alive_than_with_checkpointing() -> None:
    model, x = blocks(12), torch.randn(1024, WIDTH)
    with LiveStorageMeter() as plain:
        model(x).sum().backward()
    model.zero_grad()
    with LiveStorageMeter() as checkpointed:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
    model.zero_grad()
    with microbatch_blocks(model, chunks=CHUNKS), LiveStorageMeter() as divided:
        model(x).sum().backward()
    assert divided.peak < checkpointed.peak < plain.peak


def test_a_divided_model_is_freed_with_its_last_name_and_its_graph() -> None:
    """Without remove(), and by reference counts alone; backward still finds a model that only its graph holds."""
    model = blocks()
    microbatch_blocks(model, chunks=CHUNKS)
    copied = copy.deepcopy(model)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    alive, forward = [weakref.ref(module) for module in (*model, *copied)], model[0].forward
    gc.collect()
    gc.disable()
    try:
        losses = [model(x).sum(), copied(x).sum()]
        del model, copied
        torch.autograd.backward(losses)
        del losses
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()
    with pytest.raises(RefusedError, match="keep the module"):
        forward(x)
