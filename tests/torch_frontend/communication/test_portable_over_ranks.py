"""Portable state of sharded parameters: gathered into one file, distributed from it, and all processes or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_models import Net, assert_bitwise, data, ddp, everything, parameters_of, sharded, train
from tests.support.ranks import RankError, Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from penstock.core.errors import InvalidArgumentError, PenstockError, RefusedError
from penstock.core.portable.file import load
from penstock.torch_frontend import AdamW, StableAdamW, export_state, import_state, release_gradients

pytestmark = pytest.mark.xdist_group("distributed")


def build(kind: str, dtype: torch.dtype, seed: int = 0, compensation: str = "auto") -> tuple[nn.Module, Any]:
    """A model, over all ranks in one of several ways, and its optimizer."""
    net = Net(dtype, seed=seed)
    if kind == "ddp":
        model: nn.Module = ddp(net)
    elif kind == "fsdp2":
        model = sharded(net)
    elif kind == "hybrid":  # replicas of shards
        over = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
        model = fully_shard(net, mesh=over)
    elif kind == "tensor_parallel":  # one dimension is cut twice
        over = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, over["tensor"], {"first": ColwiseParallel(output_layouts=Replicate())})
        model = fully_shard(net, mesh=over["data"])
    else:
        model = net
    return model, StableAdamW(model.parameters(), lr=1e-2, compensation=compensation, seed=seed)


def goes_through_one_process(kind: str, dtype: torch.dtype, compensation: str, where: str) -> None:
    model, optimizer = build(kind, dtype, compensation=compensation)
    train(model, optimizer, range(3))
    path = f"{where}/{kind}"
    export_state(path, optimizer, model, parameters=True)
    expected = everything(model, optimizer)
    single, alone = build("single", dtype, seed=1, compensation=compensation)
    import_state(path, alone, single, parameters=True)
    assert_bitwise(everything(single, alone), expected, "sharded to whole")
    if dist.get_rank() == 0:
        export_state(f"{path}_alone", alone, single, parameters=True)
        assert Path(path).read_bytes() == Path(f"{path}_alone").read_bytes()
    again, fresh = build(kind, dtype, seed=2, compensation=compensation)
    release_gradients(again, fresh)
    import_state(path, fresh, again, parameters=True)
    assert_bitwise(everything(again, fresh), expected, "whole to sharded")
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert type(fresh.state[other][key]) is type(value), key
            assert getattr(fresh.state[other][key], "dtype", fresh.state[other][key]) == getattr(value, "dtype", value), key
            assert getattr(fresh.state[other][key], "placements", None) == getattr(value, "placements", None), key
    train(model, optimizer, range(3, 5))
    train(again, fresh, range(3, 5))
    assert_bitwise(everything(again, fresh), everything(model, optimizer), "going on")


@pytest.mark.parametrize("kind", ["fsdp2", "hybrid", "tensor_parallel", "stochastic"])
def test_shards_to_one_process_and_back(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """bfloat16, in split: also int16, which gloo does not send. Bit for bit, into a released model, too."""
    engine, compensation = ("hybrid", kind) if kind == "stochastic" else (kind, "auto")
    try:
        ranks.run(goes_through_one_process, engine, torch.bfloat16, compensation, str(tmp_path))
    except RankError as error:
        if "FSDP+TP sharding does not support uneven sharding" in str(error):
            pytest.skip("this torch cannot cut an odd dimension twice")
        raise


def replicated(where: str) -> None:
    """One process writes, all read."""
    model, optimizer = build("ddp", torch.float32)
    train(model, optimizer, range(2))
    if dist.get_rank() == 0:
        export_state(f"{where}/ddp", optimizer, model, parameters=True)
    dist.barrier()
    assert set(load(f"{where}/ddp").parameters) == {name for name, _ in Net().named_parameters()}
    again, fresh = build("ddp", torch.float32)
    import_state(f"{where}/ddp", fresh, again, parameters=True)
    assert_bitwise(everything(again, fresh), everything(model, optimizer), "replicated")


def test_a_replicated_model_has_the_names_of_a_plain_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(replicated, str(tmp_path))


def all_or_none(where: str) -> None:
    model, optimizer = build("fsdp2", torch.float32)
    rank = dist.get_rank()
    train(model, optimizer, range(2))
    path = f"{where}/state"
    export_state(path, optimizer, model)
    train(model, optimizer, range(2, 3))
    before = everything(model, optimizer)

    def failing(error: type[PenstockError], said: str, function: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(error, match=said):
            function(*arguments, **options)
        assert_bitwise(everything(model, optimizer), before, said)

    missing = path if rank == 0 else f"{where}/missing"
    failing(
        *((RefusedError, "process 1 failed") if rank == 0 else (InvalidArgumentError, "missing")),
        import_state,
        missing,
        optimizer,
        model,
    )
    failing(RefusedError if rank else PenstockError, "nowhere", export_state, f"{where}/nowhere/state", optimizer, model)
    earlier = Path(path).read_bytes()
    failing(RefusedError, "other arguments", export_state, path, optimizer, model, parameters=rank == 0)
    stage = Net() if rank == 0 else nn.Linear(2, 2)
    other = AdamW(sharded(stage).parameters() if rank == 0 else fully_shard(stage).parameters())
    failing(RefusedError, "parts of the same model", export_state, path, other, stage)
    assert Path(path).read_bytes() == earlier
    import_state(path, optimizer, model)


def test_an_error_of_one_process_is_one_of_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(all_or_none, str(tmp_path))


def torch_optim(where: str) -> None:
    """From sharded torch.optim.AdamW, where one layer was never used."""
    model = sharded(Net(torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    export_state(f"{where}/torch", optimizer, model, parameters=True)
    again = sharded(Net(torch.float64, seed=3))
    fresh = AdamW(again.parameters(), lr=1e-2)
    import_state(f"{where}/torch", fresh, again, parameters=True, hyperparameters=True)
    train(model, optimizer, range(3, 6))
    train(again, fresh, range(3, 6))
    for p, q in zip(parameters_of(model), parameters_of(again), strict=True):
        assert (p - q).norm() <= 1e-12 * q.norm()


def test_torch_optim_comes_in_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(torch_optim, str(tmp_path))


def after_an_evaluation(where: str) -> None:
    """The outermost parameters then wait as a whole for a backward; the text says what to do."""
    root = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    optimizer = AdamW(root.parameters())
    with torch.no_grad():
        root(data(0))
    with pytest.raises(InvalidArgumentError, match=r"model\.reshard\(\)"):
        export_state(f"{where}/state", optimizer, root)
    root.reshard()
    export_state(f"{where}/state", optimizer, root)
    assert set(load(f"{where}/state").parameters) == {"0.weight", "0.bias"}


def test_export_after_an_evaluation_asks_for_reshard(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(after_an_evaluation, str(tmp_path))


def flat() -> None:
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(RefusedError, match="fully_shard"):
        export_state("nowhere", AdamW(model.parameters()), model)


def test_flattened_parameters_are_refused(ranks: Ranks) -> None:
    ranks.run(flat)
