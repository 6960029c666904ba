"""Loops that are not the plain one: checkpointed layers, an exception, the lenient calls, tokens counted over ranks."""

from __future__ import annotations

import pytest
from tests.support.rank_models import (
    ENGINES,
    LR,
    THREE,
    Net,
    assert_bitwise,
    assert_ranks_equal,
    data,
    ddp,
    loss_of,
    parameters_of,
    train,
    wrapped,
)
from tests.support.ranks import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.torch_frontend import (
    AdamW,
    prepare_for_gradient_release,
    release_gradients,
    remove_gradient_release,
)

pytestmark = pytest.mark.xdist_group("distributed")


class Checkpointed(Net):
    """Every layer computed twice."""

    reentrant = True

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = x.requires_grad_()
        for layer in (self.first, self.middle):
            h = checkpoint(lambda x, layer=layer: layer(x).tanh(), h, use_reentrant=self.reentrant)
        return self.last(h)


def checkpointed(engine: str, reentrant: bool) -> None:
    stock = ddp(Net())
    train(stock, AdamW(stock.parameters(), **LR), range(6))
    net = Checkpointed()
    net.reentrant = reentrant
    model = wrapped(net, engine)
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(6))
    assert_ranks_equal(parameters_of(model), engine)
    assert_bitwise(parameters_of(model), parameters_of(stock), engine)


@pytest.mark.parametrize("engine", THREE)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_equal_stock_ddp_bit_for_bit(ranks: Ranks, engine: str, reentrant: bool) -> None:
    ranks.run(checkpointed, engine, reentrant)


def recovers() -> None:
    """An exception in the middle of a backward, on all ranks: what was updated stays, and training goes on alike."""
    model = Net()
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(2))

    class Error(Exception):
        pass

    def fail(gradient: Tensor) -> None:
        raise Error

    h = model.first(data(2)).tanh()
    h.register_hook(fail)
    with pytest.raises(Error):
        model.last(model.middle(h).tanh()).mean().backward()
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6))
    assert_ranks_equal(parameters_of(model), "process_group")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_recovers_from_an_exception_in_a_backward(ranks: Ranks) -> None:
    ranks.run(recovers)


def lenient(engine: str) -> None:
    """Every backward is an update, and nothing closes it."""
    stock = ddp(Net(dead=True), find_unused_parameters=True)
    train(stock, AdamW(stock.parameters(), **LR), range(6))
    model = ENGINES[engine](Net(dead=True))
    optimizer = AdamW(model.parameters(), **LR, gradient_release=True)
    prepare_for_gradient_release(model, optimizer)
    for step in range(6):
        loss_of(model, data(step)).backward()
    remove_gradient_release(model)
    assert_ranks_equal(parameters_of(model), engine)
    assert_bitwise(parameters_of(model), parameters_of(stock), engine)


@pytest.mark.parametrize("engine", THREE)
def test_lenient_release_equals_stock_ddp_bit_for_bit(ranks: Ranks, engine: str) -> None:
    ranks.run(lenient, engine)
