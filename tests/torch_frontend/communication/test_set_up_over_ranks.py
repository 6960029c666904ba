"""Which engine is chosen, what is refused at set-up, and what is left when a release is removed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_models import (
    ENGINES,
    LR,
    THREE,
    WIDTH,
    Net,
    assert_bitwise,
    assert_ranks_equal,
    data,
    ddp,
    loss_of,
    mesh,
    parameters_of,
    sharded,
    train,
    wrapped,
)
from tests.support.ranks import Ranks, bucket_bytes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import AdamW, release_gradients
from penstock.torch_frontend.communication import communication_name
from penstock.torch_frontend.communication.process_group import IN_FLIGHT

pytestmark = pytest.mark.xdist_group("distributed")


def chosen() -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain = communication_name(Net())
    return [plain, communication_name(Net(), alone), communication_name(ddp(Net())), communication_name(sharded(Net()))]


def test_the_engine_follows_from_the_parameters(ranks: Ranks) -> None:
    assert ranks.run(chosen) == [["process_group", "local", "ddp", "fsdp2"]] * 2


def refused(model: nn.Module, kind: type[Exception], match: str, parameters=None, **options) -> None:
    """On this rank; no hook is left, and the optimizer goes on."""
    optimizer = AdamW(model.parameters() if parameters is None else parameters, **LR)
    with pytest.raises(kind, match=match):
        release_gradients(model, optimizer, **options)
    assert optimizer.release is None
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())


def refusals() -> None:
    everyone = dist.group.WORLD
    refused(ddp(Net()), InvalidArgumentError, "processes of its DistributedDataParallel already", process_group=everyone)
    refused(sharded(Net()), InvalidArgumentError, "processes of its mesh already", process_group=everyone)
    other = [dist.new_group([rank]) for rank in range(dist.get_world_size())][1 - dist.get_rank()]
    refused(Net(), InvalidArgumentError, "does not contain this process", process_group=other)
    refused(
        Net(seed=dist.get_rank()), RefusedError, "'first.weight' .* begins with other values on other ranks.*Seed all ranks"
    )
    refused(nn.Linear(2, 2 + dist.get_rank()), RefusedError, "do not train the same parameters")
    for name, value in (("lr", 1e-3 * (1 + dist.get_rank())), ("seed", dist.get_rank())):
        with pytest.raises(RefusedError, match=rf"^param_groups\[0\]\['{name}'\] is .* on rank 0 .* on rank 1.*same settings"):
            release_gradients(model := Net(), AdamW(model.parameters(), **{name: value}))
    refused(Net(), RefusedError, "^max_norm is 1.0 on rank 0 .* and 2.0 on rank 1", max_norm=1.0 + dist.get_rank())
    outside = nn.Linear(2, 2)
    model = Net()
    optimizer = AdamW([*model.parameters(), *outside.parameters()], **LR)
    with pytest.raises(RefusedError, match="outside this model, whose gradient nothing would average"):
        release_gradients(model, optimizer)
    hooked = ddp(Net())
    hooked.register_comm_hook(None, allreduce_hook)
    refused(hooked, RefusedError, "has a communication hook of its own already")
    ignoring = Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["last.bias"])
    refused(ddp(ignoring), RefusedError, "'last.bias' is ignored")
    part = Net()
    part.first = ddp(part.first)
    refused(part, RefusedError, "'first' is wrapped in DistributedDataParallel.*Wrap the whole model")
    partly = Net()
    fully_shard(partly.first, mesh=mesh())
    refused(partly, RefusedError, "'middle.weight' is not sharded while others are")
    flat = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    refused(flat, RefusedError, "Use torch.distributed.fsdp.fully_shard")
    refused(Net(), RefusedError, "the second pass of guard.. is always a whole one", max_norm=1.0, keep_bytes=100)
    scaler = torch.amp.GradScaler("cpu")
    refused(Net(), RefusedError, "give sync=, which tells the last micro-batch", accumulation="hold", scaler=scaler)


def test_set_up_over_ranks_is_refused_and_leaves_no_hook(ranks: Ranks) -> None:
    ranks.run(refusals)


def inside_ddp() -> None:
    """The inner module, trained through DDP, which averages as well: its backward is refused, and no rank goes its own way."""
    inner = Net()
    outer = ddp(inner)
    optimizer = AdamW(inner.parameters(), **LR)
    release_gradients(inner, optimizer)
    with pytest.raises(RefusedError, match="DistributedDataParallel that release_gradients was not given"):
        loss_of(outer, data(0)).backward()
    assert_ranks_equal(parameters_of(inner), "inner module")


def joined_unequally() -> None:
    model = ddp(Net())
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    model._divide_by_initial_world_size = False  # as join() sets it; inside it the other rank would wait for ever
    before = parameters_of(model)
    with pytest.raises(RefusedError, match=r"join\(divide_by_initial_world_size=False\).*use join\(\) with its default"):
        loss_of(model, data(0)).backward()
    assert_bitwise(parameters_of(model), before, "refused")


def test_an_average_over_fewer_processes_is_refused(ranks: Ranks) -> None:
    ranks.run(joined_unequally)


def test_the_inner_module_of_ddp_is_refused_in_its_first_backward(ranks: Ranks) -> None:
    ranks.run(inside_ddp)


def taken_out(engine: str) -> None:
    """A parameter that is taken out of its group stays as it is, on every rank, and the others go on."""
    model = wrapped(Net(), engine)
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(2))
    out, *optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"]
    before = parameters_of(model)
    train(model, optimizer, range(2, 5))
    changed = [not torch.equal(old, new) for old, new in zip(before, parameters_of(model), strict=True)]
    assert out is next(model.parameters())
    assert changed == [False, *[True] * (len(changed) - 1)]
    assert_ranks_equal(parameters_of(model), engine)


@pytest.mark.parametrize("engine", THREE)
def test_a_parameter_that_is_taken_out_of_its_group_is_left_alone(ranks: Ranks, engine: str) -> None:
    ranks.run(taken_out, engine)


def unfrozen(engine: str) -> None:
    """A layer that one rank alone uses begins to train between two steps: it is averaged from its first gradient on."""
    net = Net()
    net.middle.requires_grad_(False)
    model = ENGINES[engine](net)
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(2))
    before = parameters_of(net.middle)
    net.middle.requires_grad_(True)
    for step in range(2, 5):
        train(model, optimizer, [step], skip=lambda step: dist.get_rank() == 1)
        assert_ranks_equal(parameters_of(model), engine)
    assert not any(map(torch.equal, before, parameters_of(net.middle)))


def test_a_layer_that_is_unfrozen_is_averaged_at_once(ranks: Ranks) -> None:
    ranks.run(unfrozen, "process_group")


def unfrozen_while_held() -> None:
    """The same where all of it is averaged after the last micro-batch, and clipped by step()."""
    model = Net()
    model.middle.requires_grad_(False)
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer, accumulation="hold", max_norm=0.3, sync=lambda: True)
    train(model, optimizer, range(2))
    model.middle.requires_grad_(True)
    train(model, optimizer, range(2, 4))
    assert_ranks_equal(parameters_of(model), "unfrozen while held")


def test_a_layer_that_is_unfrozen_is_averaged_with_what_is_held(ranks: Ranks) -> None:
    ranks.run(unfrozen_while_held)


def without_elements(limit: int) -> None:
    """It is handed over like any other, wherever it comes in the order."""
    with bucket_bytes(limit):
        stock = Net()
        model = nn.Module()
        model.before, model.net = nn.Parameter(torch.ones(0, 3)), Net()
        model.after = nn.Parameter(torch.ones(0))
        optimizer = AdamW(model.parameters(), **LR)
        release_gradients(model, optimizer)
        for step in range(3):
            (loss_of(model.net, data(step)) + model.before.sum() + model.after.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer = AdamW(stock.parameters(), **LR)
        release_gradients(stock, optimizer)
        train(stock, optimizer, range(3))
        assert_bitwise(parameters_of(model.net), parameters_of(stock), "beside parameters without elements")


@pytest.mark.parametrize("limit", [0, 2**20])
def test_parameters_without_elements_change_nothing(ranks: Ranks, limit: int) -> None:
    ranks.run(without_elements, limit)


def comes_and_goes(engine: str) -> None:
    """Released, plain, paused, released again: DDP's hook stays for ever, and averages plainly without a release."""
    stock = ddp(Net())
    optimizer = AdamW(stock.parameters(), **LR)
    train(stock, optimizer, range(12))
    model = wrapped(Net(), engine)
    optimizer = AdamW(model.parameters(), **LR)
    with release_gradients(model, optimizer):
        train(model, optimizer, range(3))
    if engine == "process_group":  # nobody averages a plain module
        with release_gradients(model, optimizer):
            train(model, optimizer, range(3, 6))
    else:
        train(model, optimizer, range(3, 6))
    release = release_gradients(model, optimizer)
    with release.paused():
        train(model, optimizer, range(6, 9))
    train(model, optimizer, range(9, 12))
    assert_bitwise(parameters_of(model), parameters_of(stock), engine)
    assert_ranks_equal(parameters_of(model), engine)


@pytest.mark.parametrize("engine", THREE)
def test_a_release_that_is_removed_paused_and_put_on_again(ranks: Ranks, engine: str) -> None:
    ranks.run(comes_and_goes, engine)


def zero_grad_closes(engine: str) -> None:
    """A loop that never calls step() is told so on all ranks; what was released stays released, and the step is closed."""
    models = []
    for closes in ("step", "zero_grad"):
        model = ENGINES[engine](Net(dead=True))
        optimizer = AdamW(model.parameters(), **LR)
        release_gradients(model, optimizer)
        for step in range(4):
            loss_of(model, data(step)).backward()
            if closes == "step":
                optimizer.step()
            else:
                with pytest.raises(RefusedError, match=r"without optimizer.step\(\)"):
                    optimizer.zero_grad()
        models.append(parameters_of(model))
        assert_ranks_equal(models[-1], engine)
    assert_bitwise(*models, engine)


@pytest.mark.parametrize("engine", THREE)
def test_zero_grad_closes_a_step_on_every_rank(ranks: Ranks, engine: str) -> None:
    ranks.run(zero_grad_closes, engine)


def in_flight(limit: int) -> None:
    """The bound, and the order: in the first pass, of a model used against its order, gradients wait for their turn."""
    with bucket_bytes(limit):
        _in_flight(limit)


def _in_flight(limit: int) -> None:
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    optimizer = AdamW(model.parameters(), **LR)
    release = release_gradients(model, optimizer)
    layer = (WIDTH * WIDTH + WIDTH) * 4

    def step(number: int) -> int:
        release.ledger.reset_peak()
        x = data(number)
        for index in reversed(range(8)):
            x = model[index](x).tanh()
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return release.ledger.peak

    first, later = step(0), [step(number) for number in range(1, 4)]
    assert first >= 7 * layer
    largest = max(limit, WIDTH * WIDTH * 4)
    assert max(later) <= (IN_FLIGHT + 1) * largest + limit  # the last one is being filled
    assert_ranks_equal(parameters_of(model), "process_group")


@pytest.mark.parametrize("limit", [0, 240])
def test_few_buckets_are_alive_once_the_order_is_learned(ranks: Ranks, limit: int) -> None:
    ranks.run(in_flight, limit)
