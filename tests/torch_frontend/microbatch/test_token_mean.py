"""The token mean: micro-batches of unequal numbers of tokens give the gradient of the whole batch's mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.torch_models import layers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.core.errors import InvalidArgumentError
from penstock.torch_frontend import AdamW, release_gradients, token_mean, total_weight

COUNTS = (5, 1, 11, 3)
IGNORED = -100


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs [11, 8] and labels [11], all but the first few of them ignored."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for count in COUNTS:
        labels = torch.randint(0, 8, (11,), generator=generator)
        labels[count:] = IGNORED
        found.append((torch.randn(11, 8, generator=generator, dtype=torch.float64), labels))
    return found


def model() -> nn.Sequential:
    return layers(2, dtype=torch.float64)


def loss_sum(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(network(inputs), labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def gradients(network: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in network.parameters()]


def whole() -> tuple[nn.Module, Tensor]:
    network = model()
    inputs, labels = (torch.cat(parts) for parts in zip(*micro_batches(), strict=True))
    loss = cross_entropy(network(inputs), labels, ignore_index=IGNORED)
    loss.backward()
    return network, loss


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    expected, loss = whole()
    network = model()
    total = total_weight((labels != IGNORED).sum() for _, labels in micro_batches())
    assert total.item() == sum(COUNTS)
    found = torch.zeros((), dtype=torch.float64)
    for inputs, labels in micro_batches():
        share = token_mean(loss_sum(network, inputs, labels)[0], total)
        share.backward()
        found += share.detach()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    for one, other in zip(gradients(network), gradients(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_mean_of_means_is_another_gradient() -> None:
    """What this is for: without it the short micro-batches count for too much."""
    expected, _ = whole()
    network = model()
    for inputs, labels in micro_batches():
        (cross_entropy(network(inputs), labels, ignore_index=IGNORED) / len(COUNTS)).backward()
    assert any(
        (one - other).norm() > 0.1 * other.norm() for one, other in zip(gradients(network), gradients(expected), strict=True)
    )


def test_held_micro_batches_are_released_with_it() -> None:
    expected, _ = whole()
    AdamW(expected.parameters(), lr=1e-2).step()
    network = model()
    optimizer = AdamW(network.parameters(), lr=1e-2)
    release_gradients(network, optimizer, accumulation="hold")
    total = total_weight([labels.ne(IGNORED).sum() for _, labels in micro_batches()])
    for inputs, labels in micro_batches():
        token_mean(loss_sum(network, inputs, labels)[0], total).backward()
    optimizer.step()
    for one, other in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_weights_may_be_numbers_tensors_and_alone() -> None:
    assert total_weight([1, 2.5, torch.tensor([3])]).item() == 6.5
    assert total_weight(7).item() == 7
    large = total_weight([2**40, torch.tensor(1, dtype=torch.int64)])
    assert large.item() == 2**40 + 1
    assert not total_weight(torch.tensor(2.0, requires_grad=True)).requires_grad
    half = token_mean(torch.tensor(3.0, dtype=torch.bfloat16), 7)
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(3 / 7, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: total_weight([]), "weights is empty"),
        (lambda: total_weight([torch.ones(2)]), "each must be a number or a tensor with one element"),
        (lambda: total_weight(["3"]), "weights holds '3'"),  # type: ignore[list-item]
        (lambda: token_mean(torch.ones(2), 3), "loss_sum must be a 0-d tensor"),
        (lambda: token_mean(torch.ones(()), 0), r"total=0\.0 must be a positive number"),
        (lambda: token_mean(torch.ones(()), torch.tensor(float("nan"))), "total=nan"),
        (lambda: token_mean(torch.ones(()), torch.ones((), requires_grad=True)), "total requires a gradient"),
    ],
)
def test_arguments_that_are_not_a_weight_or_a_sum_are_refused(call: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        call()
