"""Sharded parameters (DTensor), mostly without release: the same numbers as on whole tensors."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tests.support.rank_models import (
    Net,
    assert_bitwise,
    assert_close,
    assert_ranks_equal,
    data,
    ddp,
    loss_of,
    mesh,
    parameters_of,
    sharded,
    train,
    whole,
)
from tests.support.ranks import Ranks
from tests.support.torch_models import MuonWithAdamW, compiling_small_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from penstock.core.errors import RefusedError, UnsupportedTensorError
from penstock.torch_frontend import Adam, AdamW, Muon, StableAdamW, release_gradients
from penstock.torch_frontend.communication.shards import Shard, sum_over_shards

pytestmark = pytest.mark.xdist_group("distributed")


def equals_ddp(rule: type, dtype: torch.dtype, backend: str, bound: float, steps: int = 6) -> None:
    plain, parts = ddp(Net(dtype, dead=True), find_unused_parameters=True), sharded(Net(dtype, dead=True))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = rule(plain.parameters(), **options, backend="eager")
    other = rule(parts.parameters(), **options, backend=backend)
    train(plain, optimizer, range(steps))
    train(parts, other, range(steps))
    found = parameters_of(parts)
    if bound == 0:
        assert_bitwise(found, parameters_of(plain), "FSDP2 against DDP")
    else:
        assert_close(found, parameters_of(plain), bound, "FSDP2 against DDP")
    assert_ranks_equal(found, "FSDP2")
    for one, two in zip(plain.parameters(), parts.parameters(), strict=True):
        assert optimizer.state[one].keys() == other.state[two].keys()
        for key, value in other.state[two].items():
            expected = optimizer.state[one][key]
            assert value.dtype == expected.dtype, key
            assert hasattr(value, "placements") == (key != "step"), key
            if bound == 0:
                assert torch.equal(whole(value), expected), key


@pytest.mark.parametrize("rule", [AdamW, Adam, MuonWithAdamW], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharded_optimizers_without_clipping_equal_ddp_bit_for_bit(ranks: Ranks, rule: type, dtype: torch.dtype) -> None:
    ranks.run(equals_ddp, rule, dtype, "eager", 0.0)


def test_stable_adamw_sums_its_mean_square_over_shards(ranks: Ranks) -> None:
    ranks.run(equals_ddp, StableAdamW, torch.float32, "eager", 1e-6)


def orthogonalised_whole() -> None:
    """Shards of rows, of columns, one of which has no element, and replicas."""
    shapes = {ShardOf(0): (5, 3), ShardOf(1): (4, 1), Replicate(): (3, 4)}
    wholes = [torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes.values()]
    parts = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh(), [s])) for s, p in zip(shapes, wholes, strict=True)]
    optimizers = [Muon(each, lr=1e-2) for each in (wholes, parts)]
    for step in range(3):
        for one, two in zip(wholes, parts, strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            two.grad = distribute_tensor(one.grad, mesh(), two.placements)
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise([whole(p) for p in parts], [p.detach() for p in wholes], "Muon of shards")


def test_muon_takes_the_whole_matrix_of_every_kind_of_shard(ranks: Ranks) -> None:
    ranks.run(orthogonalised_whole)


def rounded_stochastically(backend: str) -> None:
    """Uneven shards, a tensor with fewer rows than ranks among them; what a shard refuses is a shard of columns."""
    models = [ddp(Net(torch.bfloat16, dead=True), find_unused_parameters=True), sharded(Net(torch.bfloat16, dead=True))]
    options = {"lr": 1e-3, "weight_decay": 0.1, "compensation": "stochastic", "seed": 2}
    with compiling_small_tensors():
        for model, chosen in zip(models, ("eager", backend), strict=True):
            train(model, AdamW(model.parameters(), **options, backend=chosen), range(6))
    found = parameters_of(models[1])
    assert_bitwise(found, parameters_of(models[0]), "stochastic, FSDP2 against DDP")
    assert_ranks_equal(found, "stochastic, FSDP2")
    columns = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6, dtype=torch.bfloat16), mesh(), [ShardOf(1)]))
    with pytest.raises(RefusedError, match=r"shape \(4, 6\) with placements .*along the first dimension only.*use 'kahan'"):
        AdamW([columns], compensation="stochastic")


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_shards_of_rows_are_rounded_stochastically_as_the_whole_tensor(ranks: Ranks, backend: str) -> None:
    ranks.run(rounded_stochastically, backend)


def the_mean_square_matters(*rules: str) -> None:
    """A gradient that is large in one shard only: a mean square for each shard would be far off.

    rules: of the groups; parameters are dealt out to them.
    """
    plain, parts = Net(), sharded(Net())
    dealt = [[list(model.parameters())[i :: len(rules)] for i in range(len(rules))] for model in (plain, parts)]
    groups = [[{"params": some, "rule": rule} for some, rule in zip(each, rules, strict=True)] for each in dealt]
    optimizers = [StableAdamW(each, lr=1e-2) for each in groups]
    for step in range(4):
        for one, two in zip(plain.parameters(), parts.parameters(), strict=True):
            gradient = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            gradient[: one.shape[0] // 2] *= 30.0 if step == 2 else 1.0
            one.grad = gradient
            two.grad = distribute_tensor(gradient, two.device_mesh, two.placements)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(parameters_of(parts), parameters_of(plain), 1e-6, "StableAdamW over shards")


def test_the_mean_square_is_summed_over_uneven_shards(ranks: Ranks) -> None:
    ranks.run(the_mean_square_matters, "stable_adamw")


def test_the_mean_square_is_summed_over_shards_where_other_groups_have_other_rules(ranks: Ranks) -> None:
    ranks.run(the_mean_square_matters, "stable_adamw", "adamw", "sgd_momentum")


def masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The float32 that a bfloat16 parameter and its split compensation stand for."""
    kept = [whole(optimizer.state[p]["compensation"]).int() for p in model.parameters()]
    high = [whole(p).view(torch.int16).int() << 16 for p in model.parameters()]
    return [(one + other).view(torch.float32) for one, other in zip(high, kept, strict=True)]


def given_gradients(models: list[torch.nn.Module], seed: int) -> None:
    """The same on every rank, whole or in parts."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*(model.parameters() for model in models), strict=True):
        gradient = (torch.randn(same[0].shape, generator=generator) * 4**seed).to(same[0].dtype)
        for p in same:
            parts = hasattr(p, "placements")
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if parts else gradient.clone()


def steps_from_unrounded_moments(backend: str) -> None:
    plain, parts = Net(torch.bfloat16), sharded(Net(torch.bfloat16))
    optimizers = [StableAdamW(plain.parameters(), lr=1e-2), StableAdamW(parts.parameters(), lr=1e-2, backend=backend)]
    for step in range(3):
        given_gradients([plain, parts], step)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(masters(parts, optimizers[1]), masters(plain, optimizers[0]), 1e-6, f"{backend}: shards in bfloat16")


def compiled_steps_from_unrounded_moments(backend: str) -> None:
    with compiling_small_tensors():
        steps_from_unrounded_moments(backend)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_the_moments_are_rounded_once_as_those_of_a_whole_tensor(ranks: Ranks, backend: str) -> None:
    """After the step, not before it, which would leave three digits of its direction."""
    ranks.run(compiled_steps_from_unrounded_moments if backend == "compiled" else steps_from_unrounded_moments, backend)


def nothing_is_cut(rule: type, backend: str) -> None:
    """Replicas of shards, each of which is the whole."""
    over = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    plain, parts = Net(torch.bfloat16), fully_shard(Net(torch.bfloat16), mesh=over)
    optimizers = [rule(model.parameters(), lr=1e-2, backend=backend) for model in (plain, parts)]
    for step in range(3):
        given_gradients([plain, parts], step)
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise(masters(parts, optimizers[1]), masters(plain, optimizers[0]), backend)


def test_where_nothing_is_cut_shards_get_the_bits_of_whole_tensors(ranks: Ranks) -> None:
    ranks.run(nothing_is_cut, StableAdamW, "eager")


def test_a_sum_over_shards_does_not_depend_on_what_is_summed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of four processes, which begins to add up each part of its buffer on another one: release and step() give the
    same bits, though one takes a few tensors together and the other all."""
    numbers = torch.rand(4, 100, generator=torch.Generator().manual_seed(0))

    def ring(sums: torch.Tensor, group: object) -> None:
        parts = [sums.clone(), *numbers[1:, -len(sums) :].to(sums.dtype)]
        for index in range(len(sums)):
            sums[index] = functools.reduce(torch.add, [part[index] for part in parts[index % 4 :] + parts[: index % 4]])

    monkeypatch.setattr(torch.distributed, "all_reduce", ring)
    shards = [Shard(("group",), 1, 4, None)] * 100
    together = sum_over_shards(shards, numbers[0].unbind())
    some = [sum_over_shards(shards[index:], numbers[0, index:].unbind())[0] for index in range(100)]
    assert together == some
    assert {total.dtype for total in together} == {torch.float32}


def one_collective_a_step() -> int:
    model = sharded(Net())
    optimizer = StableAdamW(model.parameters(), lr=1e-2)
    (model(data(0)) ** 2).mean().backward()
    counted, original = [], torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *a, **k: (counted.append(1), original(*a, **k))[1]
    try:
        optimizer.step()
    finally:
        torch.distributed.all_reduce = original
    return len(counted)


def test_a_step_needs_one_collective(ranks: Ranks) -> None:
    assert ranks.run(one_collective_a_step) == [1, 1]


def skips_on_every_rank() -> None:
    model = sharded(Net())
    optimizer = AdamW(model.parameters(), lr=1e-2, on_nonfinite="skip")
    before = parameters_of(model)
    (model(data(0)) ** 2).mean().backward()
    last = next(iter(model.parameters())).grad
    if torch.distributed.get_rank() == 1:
        last.to_local()[0] = float("inf")
    optimizer.step()
    assert optimizer.skipped == 1
    assert_bitwise(parameters_of(model), before, "a step with an infinity in one shard")


def test_an_infinity_in_one_shard_skips_the_step_on_all(ranks: Ranks) -> None:
    ranks.run(skips_on_every_rank)


def strided_shards_are_shards() -> None:
    """fully_shard over tensor parallelism of one dimension: StableAdamW's mean square is that of the whole tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    start, first, second = torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)
    second[:2] *= 30.0  # which clips the update, and on one rank only if each looked at its own part
    rank, layout = torch.distributed.get_rank(), [_StridedShard(0, split_factor=1), ShardOf(0)]

    def part(tensor: torch.Tensor) -> DTensor:
        here = tensor.chunk(2)[rank].clone()
        return DTensor.from_local(here, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride())

    plain, strided = torch.nn.Parameter(start.clone()), torch.nn.Parameter(part(start))
    optimizers = [StableAdamW([parameter], lr=1e-2) for parameter in (plain, strided)]
    for gradient in (first, second):
        plain.grad, strided.grad = gradient.clone(), part(gradient)
        for optimizer in optimizers:
            optimizer.step()
    assert_close([strided.to_local()], [plain.chunk(2)[rank]], 1e-6, "a strided shard")


def test_strided_shards_are_shards(ranks: Ranks) -> None:
    ranks.run(strided_shards_are_shards)


def tensor_parallel(arguments: dict[str, object]) -> None:
    """Its other layers are plain parameters, whose gradients are the same on all ranks."""
    alone, parallel = Net(), Net()
    parallelize_module(parallel, mesh(), {"first": ColwiseParallel(output_layouts=Replicate())})
    optimizers = [StableAdamW(model.parameters(), lr=1e-2) for model in (alone, parallel)]
    release = release_gradients(parallel, optimizers[1], **arguments)
    for step in range(3):
        batch = data(step, rank=0)
        loss_of(alone, batch).backward()
        release.guard(loss_of(parallel, batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), arguments.get("max_norm", float("inf")))
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(release.last_norm.float(), norm, rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_ranks_equal(parameters_of(parallel), "tensor parallel")
    assert_close(parameters_of(parallel), parameters_of(alone), 1e-5, "tensor parallel")


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.1}, {"accumulation": "hold"}], ids=["plain", "guard", "hold"])
def test_layers_beside_tensor_parallel_ones_are_updated_alike(ranks: Ranks, arguments: dict[str, object]) -> None:
    ranks.run(tensor_parallel, arguments)


def partial_gradients(released: bool) -> None:
    """Of a parameter that every rank has whole, and uses for its rows: as norms under torch's SequenceParallel."""
    rows_of_all = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    whole_one = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(whole_one.weight)
    parallel = copy.deepcopy(whole_one)
    parallel.weight = parameter = torch.nn.Parameter(distribute_tensor(whole_one.weight.detach(), mesh(), [Replicate()]))
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in (whole_one, parallel)]
    if released:
        release_gradients(parallel, optimizers[1])

    def step() -> None:
        parallel(distribute_tensor(rows_of_all, mesh(), [ShardOf(0)])).to_local().square().sum().backward()
        optimizers[1].step()

    with pytest.raises(UnsupportedTensorError, match=r"\(Partial\(sum\),\).*redistribute it: parameter.register_hook"):
        step()
    optimizers[1].zero_grad()
    parameter.register_hook(lambda gradient: gradient.redistribute(placements=parameter.placements))
    whole_one(rows_of_all).square().sum().backward()
    optimizers[0].step()
    step()
    assert_close([whole(parameter)], [whole_one.weight], 1e-6, "partial gradients")


@pytest.mark.parametrize("released", [False, True])
def test_partial_gradients_are_refused_with_a_remedy_that_works(ranks: Ranks, released: bool) -> None:
    ranks.run(partial_gradients, released)
