"""Ranks that are not in the same backward: each of them raises, no wrong sum is used, and training goes on alike."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from tests.support.rank_models import LR, Net, assert_bitwise, assert_ranks_equal, data, loss_of, parameters_of, train
from tests.support.ranks import Ranks
from torch import Tensor

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, release_gradients
from penstock.torch_frontend.communication import agreement

pytestmark = pytest.mark.xdist_group("distributed")

ONE_FAILED = r"backward\(\) has failed on one of the processes.*zero_grad\(\) on every process"
APART = r"not in the same backward\(\).*equally often on all processes"


class PlantedError(Exception):
    """Of one rank."""


def first() -> bool:
    return dist.get_rank() == 0


def released(**options):
    model = Net(dead=True)
    optimizer = AdamW(model.parameters(), **LR)
    return model, optimizer, release_gradients(model, optimizer, **options)


def fails_on_the_first_rank(model: Net, layer: str, loss: Tensor, *, at_call: int = 1, known_late: bool = False) -> None:
    """backward() raises on the first rank, when it reaches the layer's weight; and on the others, as the first has failed."""
    calls = [0]

    def fail(gradient: Tensor) -> None:
        calls[0] += 1
        if first() and calls[0] == at_call:
            raise PlantedError

    handle = getattr(model, layer).weight.register_hook(fail)
    others = contextlib.nullcontext() if known_late else pytest.raises(RefusedError, match=ONE_FAILED)
    with pytest.raises(PlantedError) if first() else others:
        loss.backward()
    handle.remove()


def measuring_fails(layer: str, closes: bool, at_once: bool) -> None:
    """As if the step had never been; also without zero_grad(), and where sums are not read at once."""
    agreement.reads_at_once = lambda sums: at_once
    models = []
    for failing in (False, True):
        model, optimizer, release = released(max_norm=0.3)
        train(model, optimizer, range(2), guard=release.guard)
        if failing:
            before = parameters_of(model)
            fails_on_the_first_rank(model, layer, release.guard(loss_of(model, data(9))))
            if closes:
                optimizer.zero_grad()
            assert_bitwise(parameters_of(model), before, "a measuring pass that failed")
            assert release.ledger.live == 0
            assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer, range(3, 6), guard=release.guard)
        models.append(parameters_of(model))
        assert release.ledger.live == 0
    assert_bitwise(*models, "after a measuring pass that failed")
    assert_ranks_equal(models[1], "after a measuring pass that failed")


@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_measuring_pass_that_fails_on_one_rank(ranks: Ranks, layer: str, closes: bool) -> None:
    ranks.run(measuring_fails, layer, closes, True)


def updating_fails(guarded: bool, layer: str) -> None:
    """What was averaged before is used on all ranks, the rest on none."""
    model, optimizer, release = released(**({"max_norm": 0.3} if guarded else {}))
    train(model, optimizer, range(2), guard=release.guard)
    fails_on_the_first_rank(model, layer, release.guard(loss_of(model, data(9))), at_call=2 if guarded else 1)
    before = parameters_of(model)
    optimizer.zero_grad()
    assert_ranks_equal(parameters_of(model), "an updating pass that failed")
    assert_bitwise([model.first.weight], [before[0]], "the layer where it failed")
    assert release.ledger.live == 0
    train(model, optimizer, range(3, 6), guard=release.guard)
    assert_ranks_equal(parameters_of(model), "after an updating pass that failed")


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("layer", ["first", "last"])
def test_an_updating_pass_that_fails_on_one_rank(ranks: Ranks, guarded: bool, layer: str) -> None:
    ranks.run(updating_fails, guarded, layer)


def step_without_backward() -> None:
    """A rank that skips a guarded backward and calls step() meets the others in their measuring pass."""
    models = []
    for apart in (False, True):
        model, optimizer, release = released(max_norm=0.3)
        train(model, optimizer, range(2), guard=release.guard)
        if apart:
            before = parameters_of(model)
            with pytest.raises(RefusedError, match=APART):
                optimizer.step() if first() else release.guard(loss_of(model, data(9))).backward()
            optimizer.zero_grad()
            assert_bitwise(parameters_of(model), before, "a backward that one rank has skipped")
        train(model, optimizer, range(3, 6), guard=release.guard)
        models.append(parameters_of(model))
    assert_bitwise(*models, "after a backward that one rank has skipped")


def test_a_step_on_one_rank_and_a_guarded_backward_on_another(ranks: Ranks) -> None:
    ranks.run(step_without_backward)


def unguarded_step_without_backward() -> None:
    """Nothing is apart here: that rank takes part with zeros."""
    model, optimizer, _ = released()
    before = parameters_of(model)
    if not first():
        loss_of(model, data(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not all((a == b).all() for a, b in zip(parameters_of(model), before, strict=True))
    assert_ranks_equal(parameters_of(model), "a rank without a backward")


def test_a_rank_without_a_backward_takes_part_with_zeros(ranks: Ranks) -> None:
    ranks.run(unguarded_step_without_backward)


def another_number_of_micro_batches() -> None:
    """The rank with fewer has closed its step when the other is still in it."""
    model, optimizer, _ = released(accumulation="state")
    for number in range(2):
        loss_of(model, data(number)).backward()
    if first():
        optimizer.step()
        optimizer.zero_grad()
    before = parameters_of(model)
    with pytest.raises(RefusedError, match=APART):
        loss_of(model, data(3)).backward()
    assert_bitwise(parameters_of(model), before, "micro-batches of different updates")


def test_another_number_of_micro_batches_on_one_rank_is_refused(ranks: Ranks) -> None:
    ranks.run(another_number_of_micro_batches)


def last_on_one_rank() -> None:
    model, optimizer, _ = released(accumulation="state", sync=first)
    before = parameters_of(model)
    with pytest.raises(RefusedError, match=APART):
        loss_of(model, data(0)).backward()
    optimizer.zero_grad()
    assert_bitwise(parameters_of(model), before, "the last micro-batch on one rank only")


def test_a_sync_that_differs_between_ranks_is_refused(ranks: Ranks) -> None:
    ranks.run(last_on_one_rank)


def test_a_measuring_pass_that_fails_on_one_rank_where_sums_are_read_later(ranks: Ranks) -> None:
    try:
        ranks.run(measuring_fails, "middle", True, False)
    finally:
        ranks.run(read_at_once)


def updating_fails_and_is_known_late() -> None:
    """Every rank is told in its next backward, once: in the one after it training goes on alike."""
    agreement.reads_at_once = lambda sums: False
    model, optimizer, release = released()
    train(model, optimizer, range(2))
    fails_on_the_first_rank(model, "middle", loss_of(model, data(9)), known_late=True)
    optimizer.zero_grad()
    with pytest.raises(RefusedError, match="one backward later"):
        loss_of(model, data(10)).backward()
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6))
    assert_ranks_equal(parameters_of(model), "after an updating pass that failed")
    assert release.ledger.live == 0
    loss_of(model, data(11)).backward()
    with pytest.raises(RefusedError, match=r"without optimizer\.step\(\)"):  # this one has not failed
        optimizer.zero_grad()


def test_an_updating_pass_that_fails_on_one_rank_where_sums_are_read_later(ranks: Ranks) -> None:
    try:
        ranks.run(updating_fails_and_is_known_late)
    finally:
        ranks.run(read_at_once)


def read_at_once() -> None:
    agreement.reads_at_once = lambda sums: True
