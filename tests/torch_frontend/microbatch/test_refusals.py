"""What cannot be divided is refused with a sentence, before anything is changed; what is unclear is asked for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.support.decoder import LENGTH, WIDTH, batch, decoder, gradients, loss_of
from torch import Tensor, nn

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import AdamW, microbatch_blocks, release_gradients


class Given(nn.Module):
    """A block that does what it is told."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.work = work

    def forward(self, x: Tensor, other: Any = None, **more: Any) -> Any:
        return self.work(self.linear(x), other, **more)


@pytest.mark.parametrize(
    ("blocks", "arguments", "text"),
    [
        ([nn.Linear(2, 2)], {"chunks": 0}, "chunks=0 must be a whole number"),
        ([nn.Linear(2, 2)], {"chunks": True}, "chunks=True"),
        ([nn.Linear(2, 2)], {"chunks": 2.0}, "chunks=2.0"),
        ([nn.Linear(2, 2)], {"chunks": 2, "batched": "x"}, r"batched='x' must be several names"),
        ([], {"chunks": 2}, "blocks is empty"),
        (nn.Linear(2, 2), {"chunks": 2}, "blocks is a Linear; give its blocks"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), {"chunks": 2}, "blocks holds a str"),
    ],
)
def test_arguments_out_of_range_are_refused(blocks: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        microbatch_blocks(blocks, **arguments)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (nn.Sequential(nn.BatchNorm1d(4)), r"BatchNorm1d '0' in a block takes statistics over the batch"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "statistics over the batch"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "statistics over the batch"),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=False), "batch_first=False"),
        (nn.LSTM(4, 4), "batch_first=False"),
    ],
)
def test_modules_with_dependent_samples_are_refused(block: nn.Module, text: str) -> None:
    with pytest.raises(RefusedError, match=text):
        microbatch_blocks([nn.Linear(2, 2), block], chunks=2)
    assert "forward" not in block.__dict__


def test_frozen_batch_statistics_are_accepted() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with microbatch_blocks([block], chunks=2):
        block(torch.ones(4, 4)).sum().backward()
        block.train()
        with pytest.raises(RefusedError, match="statistics over the batch"):
            block(torch.ones(4, 4))
    microbatch_blocks([nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)], chunks=2).remove()


def test_divided_and_nested_blocks_are_refused() -> None:
    model = decoder()
    divided = microbatch_blocks(model.layers, chunks=2)
    for blocks in (model.layers, [model], [model.layers[1]]):
        with pytest.raises(RefusedError, match="divided into micro-batches already"):
            microbatch_blocks(blocks, chunks=2)
    divided.remove()
    divided.remove()
    with pytest.raises(RefusedError, match="inside another one"):
        microbatch_blocks([model, model.head], chunks=2)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_forward_replaced_since_is_not_overwritten() -> None:
    model = decoder(2)
    divided = microbatch_blocks(model.layers, chunks=2)
    ours = model.layers[1].forward
    model.layers[1].forward = functools.partial(ours)
    with pytest.raises(RefusedError, match="replaced after microbatch_blocks"):
        divided.remove()
    assert "forward" in model.layers[0].__dict__
    model.layers[1].forward = ours
    divided.remove()


def test_a_cache_is_refused_and_may_be_passed_whole_if_the_batched_arguments_are_named() -> None:
    class Cache:
        pass

    block = Given(lambda x, cache: x)
    with (
        microbatch_blocks([block], chunks=2),
        pytest.raises(RefusedError, match=r"argument other of the block is a Cache.*use_cache"),
    ):
        block(batch(), Cache())
    with microbatch_blocks([block], chunks=2, batched=["x"]):
        block(batch(), Cache()).sum().backward()


def test_a_tensor_with_the_batch_size_by_coincidence_is_refused() -> None:
    x = batch(LENGTH)  # as many samples as positions
    table = torch.rand(LENGTH, LENGTH, dtype=torch.float64)
    block = Given(lambda x, table: torch.einsum("btd,ts->bsd", x, table))
    expected = block(x, table)
    with microbatch_blocks([block], chunks=LENGTH):
        with pytest.raises(RefusedError, match=r"argument other of the block has shape \(5, 5\).*batched="):
            block(x, table)
        with pytest.raises(RefusedError, match="argument other"):
            block(x, other=table)
        assert Given.forward is type(block).forward
    with microbatch_blocks([block], chunks=LENGTH, batched=["x"]):
        torch.testing.assert_close(block(x, table), expected, rtol=1e-12, atol=0)
    same = Given(lambda x, other: x + other)
    with microbatch_blocks([same], chunks=2):  # the shape of the first: it holds what that holds
        torch.testing.assert_close(same(x, x), same.linear(x) + x, rtol=1e-12, atol=0)


def test_names_of_batched_arguments_are_checked() -> None:
    block = Given(lambda x, other, more=None: x + other)
    with (
        microbatch_blocks([block], chunks=2, batched=["y"]),
        pytest.raises(InvalidArgumentError, match=r"it got x, other, more"),
    ):
        block(batch(), batch(), more=batch())
    with (
        microbatch_blocks([block], chunks=2, batched=["x", "other"]),
        pytest.raises(InvalidArgumentError, match="argument other of the block is named in batched=, but its dimension 0 is 3"),
    ):
        block(batch(), batch(3))
    with microbatch_blocks([block], chunks=2, batched=["x", "other"]):  # one for all samples
        torch.testing.assert_close(block(batch(), batch(1)), block.linear(batch()) + batch(1), rtol=1e-12, atol=0)
    with microbatch_blocks([nn.Identity()], chunks=2) as divided, pytest.raises(RefusedError, match="without a tensor"):
        next(iter(divided._divided))(torch.ones(()))


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda x, _: (x, x.mean()), r"shape \(\) for a chunk of 3 samples"),
        (lambda x, _: x.transpose(0, 1), r"shape \(5, 3, 16\)"),
        (lambda x, _: (x, object()), "returned a object"),
        (lambda x, _: (x, len(x)), "different structure"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(work: Any, text: str) -> None:
    block = Given(work)
    with microbatch_blocks([block], chunks=2), pytest.raises(RefusedError, match=text):
        block(batch())
    with microbatch_blocks([block], chunks=1):  # a single chunk may return anything
        block(batch())


def test_buffers_that_change_in_forward_are_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

    block = Counting()
    with microbatch_blocks([block], chunks=2), pytest.raises(RefusedError, match="changes its buffer 'count' in forward"):
        block(batch().requires_grad_())


@pytest.mark.parametrize("chunks", [1, 2])
def test_arguments_written_in_place_are_refused(chunks: int) -> None:
    """Noticed in forward: in backward, the blocks behind it would be released already."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))).double()
    with microbatch_blocks([model[1]], chunks=chunks), pytest.raises(RefusedError, match="writes to its argument in place"):
        model(batch())


def test_captured_tensors_that_require_a_gradient_are_refused() -> None:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    model = decoder()
    model.layers[1] = Given(lambda x, _: x * scale)
    with microbatch_blocks(model.layers, chunks=2), pytest.raises(RefusedError, match=r"a tensor of shape \(\) that requires"):
        loss_of(model, batch()).backward()
    assert scale.grad is None
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())


def test_an_empty_batch_is_one_chunk() -> None:
    model = decoder()
    with microbatch_blocks(model.layers, chunks=2):
        assert model(batch(0)).shape == (0, LENGTH, 3)
        gradients(model, batch(1))


def test_a_vector_with_the_batch_size_is_divided_only_where_it_is_named() -> None:
    """One number for each head, where there are as many heads as samples, looks like one for each sample."""
    x = batch()
    block, vector = Given(lambda y, other: y * other.mean()), torch.arange(float(len(x)), dtype=torch.float64)
    with microbatch_blocks([block], chunks=2), pytest.raises(RefusedError, match=r"argument other.*Name the arguments"):
        block(x, vector)
    with microbatch_blocks([block], chunks=2, batched=["x"]):
        torch.testing.assert_close(block(x, vector), block.linear(x) * vector.mean())  # the order of a sum may follow the rows


@pytest.mark.parametrize("chunks", [3, 6])
def test_an_output_with_a_row_for_each_sample_by_coincidence_is_refused(chunks: int) -> None:
    x = batch()
    rows = len(x) // chunks
    block = Given(lambda y, other: (y, y.mean(dim=tuple(range(y.dim() - 1))).reshape(rows, -1)))
    with microbatch_blocks([block], chunks=chunks), pytest.raises(RefusedError, match=r"its dimension 0 is not the batch"):
        block(x)


class Scaled(nn.Module):
    """A block that multiplies by a tensor of another module, once it is told to."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.factor = [factor]
        self.scaling = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor[0] if self.scaling else self.linear(x)


class TwoScaled(nn.Module):
    """Two blocks that share the model's factor."""

    def __init__(self, *, scaling: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))
        self.blocks = nn.ModuleList(Scaled(self.factor) for _ in range(2))
        self.scale(scaling)

    def scale(self, scaling: bool) -> None:
        for block in self.blocks:
            block.scaling = scaling  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).pow(2).sum()


def test_a_block_that_uses_a_parameter_of_another_module_is_refused() -> None:
    model = TwoScaled(scaling=True)
    with microbatch_blocks(model.blocks, chunks=2), pytest.raises(RefusedError, match=r"shape \(16,\).*neither one of its"):
        model(batch()).backward()


def test_a_block_that_begins_to_use_a_parameter_of_another_module_is_right_or_refused() -> None:
    """It is looked for in a block's first backward only: later, each chunk adds to `.grad`, which a release refuses."""
    model = TwoScaled(scaling=False)
    optimizer = AdamW(model.parameters(), lr=0.0)
    with microbatch_blocks(model.blocks, chunks=2):
        model(batch()).backward()
        model.scale(True)
        model.zero_grad()
        model(batch()).backward()
        divided = model.factor.grad
        model.zero_grad()
        release_gradients(model, optimizer)
        with pytest.raises(RefusedError, match="'factor': a second backward"):
            model(batch()).backward()
    whole = TwoScaled(scaling=True)
    whole.load_state_dict(model.state_dict())
    whole(batch()).backward()
    torch.testing.assert_close(divided, whole.factor.grad)
