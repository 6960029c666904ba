"""FSDP2: parameter groups, collectives, memory, and its options."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import calls_in
from tests.support.rank_models import (
    LR,
    WIDTH,
    Net,
    assert_bitwise,
    assert_close,
    assert_ranks_equal,
    data,
    ddp,
    everything,
    loss_of,
    mesh,
    parameters_of,
    sharded,
    train,
)
from tests.support.ranks import Ranks, bucket_bytes
from tests.support.torch_models import MuonWithAdamW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock.torch_frontend import AdamW, Lion, StableAdamW, release_gradients
from penstock.torch_frontend.communication.fsdp2 import parameter_groups

pytestmark = pytest.mark.xdist_group("distributed")


def stock(steps: int, rule: type = AdamW) -> list[torch.Tensor]:
    model = ddp(Net())
    train(model, rule(model.parameters(), **LR), range(steps))
    return parameters_of(model)


def collectives(rule: type, limit: int) -> int:
    """All-reduces in one backward and step: FSDP2's own collectives are of other kinds."""
    with bucket_bytes(limit):
        return _collectives(rule)


def _collectives(rule: type) -> int:
    model = sharded(Net())
    optimizer = rule(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(1))
    counted, original = [], dist.all_reduce
    dist.all_reduce = lambda *a, **k: (counted.append(a[0].numel()), original(*a, **k))[1]
    try:
        loss_of(model, data(1)).backward()
        in_backward = list(counted)
        optimizer.step()
    finally:
        dist.all_reduce = original
    assert counted == in_backward, "step() has nothing to exchange"
    return len(counted)


def walks() -> None:
    """FSDP2 calls the hooks inside the backward of a function of its own, which is not a pass of its own."""
    model = sharded(Net())
    optimizer = AdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    for step in range(3):
        counted = calls_in(loss_of(model, data(step)).backward)
        assert counted["reachable"] == 0
        assert counted["_average"] > 0
        optimizer.step()
        optimizer.zero_grad()


def test_the_graph_is_not_walked(ranks: Ranks) -> None:
    ranks.run(walks)


@pytest.mark.parametrize(("limit", "deliveries"), [(0, 3), (256, 2), (2**20, 1)])
def test_parameter_groups_share_a_collective_as_far_as_they_fit_a_bucket(ranks: Ranks, limit: int, deliveries: int) -> None:
    """Three groups, of 32, 224 and 196 bytes; one more all-reduce for the norm that is published."""
    assert ranks.run(collectives, StableAdamW, limit) == [deliveries + 1] * 2
    assert ranks.run(collectives, AdamW, limit) == [0 + 1] * 2
    assert ranks.run(collectives, Lion, limit) == [0 + 1] * 2


def groupings(how: str) -> None:
    model = Net()
    if how == "one group for all":
        fully_shard(model, mesh=mesh())
    elif how == "a list":
        fully_shard([model.first, model.middle], mesh=mesh())
        fully_shard(model, mesh=mesh())
    else:
        fully_shard(model.middle, mesh=mesh())
        fully_shard(model, mesh=mesh())
    sizes = sorted(len(group) for group in parameter_groups(model))
    assert sizes == {"one group for all": [6], "a list": [2, 4], "the rest in the root": [2, 4]}[how]
    optimizer = StableAdamW(model.parameters(), **LR)
    release_gradients(model, optimizer)
    train(model, optimizer, range(10))
    assert_ranks_equal(parameters_of(model), how)
    assert_close(parameters_of(model), stock(10, StableAdamW), 1e-6, how)


@pytest.mark.parametrize("how", ["one group for all", "a list", "the rest in the root"])
def test_fsdp2_groups_equal_stock_ddp(ranks: Ranks, how: str) -> None:
    ranks.run(groupings, how)


def two_dimensional(rule: type, shape: tuple[int, int]) -> None:
    """Hybrid sharding: replicas of shards."""
    over = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = Net()
    for layer in model.layers():
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = rule(model.parameters(), **LR)
    release = release_gradients(model, optimizer, max_norm=float("inf"))
    train(model, optimizer, range(10), guard=release.guard)
    assert_ranks_equal(parameters_of(model), str(shape))
    assert_close(parameters_of(model), stock(10, rule), 1e-6, str(shape))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("rule", [StableAdamW, MuonWithAdamW])
def test_hybrid_sharding_equals_stock_ddp(ranks: Ranks, rule: type, shape: tuple[int, int]) -> None:
    ranks.run(two_dimensional, rule, shape)


def scaled_replicas(shape: tuple[int, int]) -> None:
    """Every replica learns of an overflow, and of the norm."""
    over = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    seen = []
    for releases in (False, True):
        model = Net()
        for layer in model.layers():
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        optimizer = AdamW(model.parameters(), **LR)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        release = release_gradients(model, optimizer, scaler=scaler) if releases else None
        history = []
        for step in range(5):
            loss = loss_of(model, data(step)) * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)
            scaler.scale(release.guard(loss) if release else loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
            history.append((scaler.get_scale(), float(torch.nan_to_num(norm, nan=torch.inf, posinf=torch.inf))))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_ranks_equal(parameters_of(model), str(shape))
        seen.append((history, parameters_of(model)))
    torch.testing.assert_close(seen[0][0], seen[1][0])
    assert_bitwise(seen[1][1], seen[0][1], str(shape))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_hybrid_sharding_with_a_scaler_equals_plain_fsdp2(ranks: Ranks, shape: tuple[int, int]) -> None:
    ranks.run(scaled_replicas, shape)


def paused_after_release() -> None:
    """The published norm is not a part of gradients that come later, though shards run no hook before they are added."""
    model, plain = sharded(Net()), sharded(Net())
    release = release_gradients(model, AdamW(model.parameters(), lr=0.0))
    loss_of(model, data(0)).backward()
    with release.paused():
        loss_of(model, data(1)).backward()
    loss_of(plain, data(1)).backward()
    assert_bitwise(*([p.grad.full_tensor() for p in one.parameters()] for one in (model, plain)), "paused")


def test_a_paused_backward_finds_no_published_norm_in_its_shards(ranks: Ranks) -> None:
    ranks.run(paused_after_release)


def guarded_pass_fails(limit: int) -> None:
    """Gradients that still wait when the pass fails are clipped like the rest of it, however late they are delivered."""
    bound = 1e-6
    with bucket_bytes(limit):
        model = sharded(Net())
        optimizer = AdamW(model.parameters(), lr=0.0)
        release = release_gradients(model, optimizer, max_norm=bound)
        calls = [0]

        def fail(*_: object) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise ValueError("planted")

        handle = model.middle.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="planted"):
            release.guard(loss_of(model, data(0))).backward()
        handle.remove()
        optimizer.zero_grad()
        used = [state["debiased_exp_avg"].full_tensor() for state in optimizer.state.values()]
        assert len(used) >= 2
        assert all(moment.norm() <= bound for moment in used)
        assert_ranks_equal(parameters_of(model), "after a guarded pass that failed")


@pytest.mark.parametrize("limit", [0, 2**20])
def test_waiting_gradients_of_a_guarded_pass_that_fails_are_clipped(ranks: Ranks, limit: int) -> None:
    ranks.run(guarded_pass_fails, limit)


def mixed_precision(reduce_dtype: torch.dtype | None) -> None:
    """Computed in bfloat16: the parameters, their gradients and their moments stay float32. As without release."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    trained = []
    for releases in (False, True):
        model = sharded(Net(), mp_policy=policy)
        optimizer = AdamW(model.parameters(), **LR)
        if releases:
            release_gradients(model, optimizer)
        train(model, optimizer, range(6))
        trained.append(parameters_of(model))
        assert all(state["debiased_exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    assert_bitwise(*trained, "release against plain FSDP2")


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision_equals_plain_fsdp2_bit_for_bit(ranks: Ranks, reduce_dtype: torch.dtype | None) -> None:
    ranks.run(mixed_precision, reduce_dtype)


def options(name: str) -> None:
    trained = []
    for releases in (False, True):
        model = sharded(Net(), reshard_after_forward=name != "kept after forward")
        if name == "kept after backward":
            model.set_reshard_after_backward(False)
        optimizer = AdamW(model.parameters(), **LR)
        if releases:
            release_gradients(model, optimizer)
        for step in range(4):
            loss_of(model, data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if name == "kept after backward":
                model.reshard()
                for layer in model.layers():
                    layer.reshard()
        trained.append(parameters_of(model))
    assert_bitwise(*trained, name)


@pytest.mark.parametrize("name", ["kept after forward", "kept after backward"])
def test_resharding_options_equal_plain_fsdp2_bit_for_bit(ranks: Ranks, name: str) -> None:
    ranks.run(options, name)


def peak() -> None:
    """One layer of gradients, of the part that lies here, by storage; the ledger says the same."""
    with bucket_bytes(0):
        _peak()


def _peak() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    seen: dict[StorageWeakRef, int] = {}
    most = [0]

    def look(parameter) -> None:
        storage = parameter.grad.to_local().untyped_storage()
        seen[StorageWeakRef(storage)] = storage.nbytes()
        most[0] = max(most[0], sum(size for reference, size in seen.items() if not reference.expired()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    optimizer = AdamW(model.parameters(), **LR)
    release = release_gradients(model, optimizer)
    for step in range(3):
        model(data(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer = (WIDTH * WIDTH + WIDTH) * 4 // dist.get_world_size()
    assert layer == most[0], f"{most[0]} bytes alive, a layer has {layer}"
    assert release.ledger.peak == layer


def test_one_layer_of_gradients_is_alive(ranks: Ranks) -> None:
    ranks.run(peak)


def changing_betas(step: int) -> tuple[float, float]:
    return 0.5 + 0.45 * (step % 3) / 2, 0.99 - 0.04 * (step % 4)


def under_changing_betas() -> None:
    states = []
    for model, released in ((sharded(Net()), True), (ddp(Net()), False)):
        optimizer = AdamW(model.parameters(), **LR)
        if released:
            release_gradients(model, optimizer)
        for step in range(6):
            optimizer.param_groups[0]["betas"] = changing_betas(step)
            train(model, optimizer, range(step, step + 1))
        states.append(everything(model, optimizer))
    assert_bitwise(*states, "changing betas")


def test_sharded_moments_follow_betas_bitwise(ranks: Ranks) -> None:
    ranks.run(under_changing_betas)
