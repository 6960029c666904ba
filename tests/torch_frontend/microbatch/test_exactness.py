"""Blocks over micro-batches: the gradient is that of the whole batch, whatever a block is given and returns."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.support.decoder import BATCH, HEADS, LENGTH, WIDTH, Block, assert_equal_gradients, batch, decoder, gradients, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.torch_frontend import microbatch_blocks

FACTORS = torch.rand(LENGTH, WIDTH // HEADS, dtype=torch.float64), torch.rand(1, 1, LENGTH, 1, dtype=torch.float64)


def with_everything(block: nn.Module, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(len(x), 1, LENGTH, LENGTH, generator=generator) > 0.3
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    return block(x, mask, factors=FACTORS, scale=0.5)


@pytest.mark.parametrize("chunks", [1, 2, 3, BATCH, BATCH + 5])
@pytest.mark.parametrize("call", [lambda block, x: block(x), with_everything], ids=["plain", "mask_and_factors"])
def test_the_gradient_is_that_of_the_whole_batch(chunks: int, call: Any) -> None:
    model = decoder(call=call)
    expected, loss = gradients(model, batch()), loss_of(model, batch())
    with microbatch_blocks(model.layers, chunks=chunks):
        torch.testing.assert_close(loss_of(model, batch()), loss, rtol=1e-12, atol=0)
        assert_equal_gradients(gradients(model, batch()), expected)
    assert "forward" not in model.layers[0].__dict__


def test_float32_is_within_the_bound_of_two_summations() -> None:
    """One linear block with a given output gradient d: dW = sum over n = samples*length of d x^T.

    Any order of n products and sums in float32 is within n*u/(1 - n*u) * |d|^T |x| of it, u = 2^-24; two orders differ by
    twice that at most.
    """
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), batch(64, torch.float32)
    d = torch.randn(64, LENGTH, WIDTH)
    (layer(x) * d).sum().backward()
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad, None
    with microbatch_blocks([layer], chunks=8):
        (layer(x) * d).sum().backward()
    n = 64 * LENGTH
    bound = 2 * n * 2**-24 / (1 - n * 2**-24) * (d.flatten(0, 1).abs().T.double() @ x.flatten(0, 1).abs().double())
    assert ((layer.weight.grad.double() - expected.double()).abs() <= bound).all()
    assert not torch.equal(layer.weight.grad, expected)  # other orders of summation: the bound is needed


def test_half_precision_sums_are_rounded_once() -> None:
    """Chunks' gradients that are bfloat16 numbers exactly add up in float32, where bfloat16 would lose the small ones."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    x = torch.tensor([[256.0], *[[1.0]] * 15], dtype=torch.bfloat16)
    with microbatch_blocks([layer], chunks=16):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.bfloat16
    assert layer.weight.grad.item() == torch.tensor(271.0).bfloat16().item() != 256.0


def test_inputs_and_shared_arguments_get_their_gradients() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor, bias: Tensor, *, more: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
            y = self.linear(x) * more["scale"] + bias
            return y.tanh(), None, (y > 0).long()

    torch.manual_seed(0)
    block = Shifted()
    bias = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(BATCH, 1, 1, dtype=torch.float64, requires_grad=True)
    x = batch().requires_grad_()
    tensors = (x, bias, scale, *block.parameters())

    def run() -> tuple[Tensor, ...]:
        y, nothing, positive = block(x, bias, more={"scale": scale})
        assert nothing is None
        assert not positive.requires_grad
        return torch.autograd.grad((y * positive).sum(), tensors)

    expected = run()
    with microbatch_blocks([block], chunks=3):
        for found, wanted in zip(run(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the forward without a graph
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False], ids=["around_the_block", "inside_the_block"])
def test_blocks_under_activation_checkpointing_have_the_same_gradient(reentrant: bool, outside: bool) -> None:
    model = decoder()
    expected = gradients(model, batch())
    if outside:
        model.call = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    else:
        for block in model.layers:
            narrow = block.narrow.forward
            block.narrow.forward = lambda x, narrow=narrow: checkpoint(narrow, x, use_reentrant=reentrant)
    with microbatch_blocks(model.layers, chunks=3):
        assert_equal_gradients(gradients(model, batch()), expected)


def test_tied_frozen_unused_and_repeated_blocks_have_the_same_gradient() -> None:
    model = decoder(4)
    model.layers[1].wide.weight = model.layers[0].wide.weight  # tied over blocks
    model.layers[2] = model.layers[0]  # one block twice
    model.layers[3].output.weight.requires_grad_(False)
    model.layers[3].extra = nn.Parameter(torch.ones(3, dtype=torch.float64))  # in no computation
    expected = gradients(model, batch())
    assert expected["layers.3.extra"] is None
    with microbatch_blocks(model.layers, chunks=2):
        assert_equal_gradients(gradients(model, batch()), expected)
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)  # the first blocks give no gradient at all
    expected = gradients(model, batch())
    with microbatch_blocks(model.layers, chunks=2):
        assert_equal_gradients(gradients(model, batch()), expected)


def test_a_frozen_block_passes_the_gradient_on() -> None:
    model = decoder()
    model.layers[2].requires_grad_(False)
    expected = gradients(model, batch())
    with microbatch_blocks(model.layers, chunks=3):
        assert_equal_gradients(gradients(model, batch()), expected)


def test_a_weight_that_is_used_in_a_block_and_outside_of_it_under_autocast() -> None:
    """Autocast keeps casts of weights; one made without a graph must not reach the use outside."""
    model = decoder(2, dtype=torch.float32)
    model.head = nn.Linear(WIDTH, WIDTH)
    model.head.weight = model.layers[0].output.weight

    def run() -> dict[str, Tensor | None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(dtype=torch.float32))
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        return found

    expected = run()
    with microbatch_blocks(model.layers, chunks=2):
        found = run()
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= 8 * 2**-8 * wanted.norm(), name  # bfloat16 products, in another order


def test_recomputed_dropout_draws_the_same_numbers() -> None:
    """Chunked by hand with the same seed, every chunk through all that follows: one block, so that the order is the same."""
    model = decoder(1, dropped=0.5)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    x = plain.embedding(batch())
    bounds = [0, 2, 4, BATCH]
    parts = [plain.layers[0](x[a:b]) for a, b in itertools.pairwise(bounds)]
    plain.head(torch.cat(parts)).pow(2).mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with microbatch_blocks(model.layers, chunks=3):
        torch.manual_seed(3)
        loss = loss_of(model, batch())
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)  # backward leaves the random numbers of others alone
    assert_equal_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


def test_without_random_state_dropout_would_differ() -> None:
    model = decoder(1, dropped=0.5)
    with microbatch_blocks(model.layers, chunks=3):
        torch.manual_seed(3)
        expected = gradients(model, batch())
    with microbatch_blocks(model.layers, chunks=3, preserve_rng_state=False):
        torch.manual_seed(3)
        found = gradients(model, batch())
    assert not torch.equal(found["layers.0.narrow.weight"], expected["layers.0.narrow.weight"])


def test_eval_without_gradients_runs_undivided_and_otherwise_divided() -> None:
    sizes: list[int] = []
    model = decoder(1)
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[0].norm.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    expected = model(batch())
    with microbatch_blocks(model.layers, chunks=3):
        sizes.clear()
        with torch.no_grad():
            torch.testing.assert_close(model(batch()), expected, rtol=1e-12, atol=1e-13)
            assert sizes == [2, 2, 3]
            model.eval()
            sizes.clear()
            assert torch.equal(model(batch()), expected)
        with torch.inference_mode():
            assert torch.equal(model(batch()), expected)
        assert sizes == [BATCH, BATCH]
        sizes.clear()
        gradients(model, batch())  # in eval mode, but with gradients
        assert sizes == [2, 2, 3, 2, 2, 3]


def test_a_copy_is_divided_by_itself_and_hooks_on_parameters_see_one_gradient() -> None:
    model = decoder(2)
    expected = gradients(model, batch())
    divided = microbatch_blocks(model.layers, chunks=3)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal_gradients(gradients(twin, batch()), expected)
    divided.remove()
    seen: list[Tensor] = []
    weight = twin.layers[0].wide.weight
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    loss_of(twin, batch()).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], 2 * expected["layers.0.wide.weight"], rtol=1e-12, atol=1e-13)


def test_a_compiled_forward_inside_a_block_has_the_same_gradient() -> None:
    model = decoder(1, dtype=torch.float32)
    expected = gradients(model, batch(dtype=torch.float32))
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="aot_eager")
    before = model.layers[0].forward
    with microbatch_blocks(model.layers, chunks=2):
        found = gradients(model, batch(dtype=torch.float32))
    assert model.layers[0].forward is before
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


def test_a_changed_parameter_is_noticed_and_graphs_can_be_kept() -> None:
    model = decoder(1)
    expected = gradients(model, batch())
    with microbatch_blocks(model.layers, chunks=2):
        loss = loss_of(model, batch())
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_equal_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
        with torch.no_grad():
            model.layers[0].norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (gradient,) = torch.autograd.grad(loss_of(model, batch()), model.embedding.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_a_module_that_lists_its_parameters_twice_has_the_same_gradient() -> None:
    """torch.nn.LSTM has a list of them besides."""

    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    model = decoder()
    model.layers[1] = Recurrent(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
    expected = gradients(model, batch())
    with microbatch_blocks(model.layers, chunks=2):
        assert_equal_gradients(gradients(model, batch()), expected)


def test_a_single_block_has_the_same_gradient() -> None:
    block = Block().double()
    x = batch()
    block(x).sum().backward()
    expected = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    with microbatch_blocks([block], chunks=4):
        block(x).sum().backward()
    assert_equal_gradients({name: parameter.grad for name, parameter in block.named_parameters()}, expected)
