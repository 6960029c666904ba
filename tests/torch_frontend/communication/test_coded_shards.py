"""States in 8 bits over ranks: shards of rows have the codes of the whole tensor, in every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_models import assert_bitwise, assert_ranks_equal, ddp, everything, mesh, parameters_of
from tests.support.ranks import Ranks
from tests.support.rows import rows
from tests.support.torch_models import MuonWithAdamW
from tests.torch_frontend.communication.test_checkpoints import load, save
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, export_state, import_state, release_gradients

pytestmark = [
    pytest.mark.xdist_group("distributed"),
    # torch's own, when it saves and loads in one process
    pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning"),
]
RULES: dict[str, Any] = {"adamw": AdamW, "muon": MuonWithAdamW}  # betas=(0.9, 0.999)
STORAGES = {
    "smallest": {"compensation": "stochastic", "state_dtype": "8bit"},
    "compact": {"compensation": "split8", "state_dtype": "8bit"},
    "bfloat16": {"compensation": "split", "state_dtype": torch.bfloat16},
}


def build(engine: str, storage: str, rule: str, seed: int = 0, **settings: Any) -> tuple[nn.Module, Any]:
    """Uneven shards, of which two are coded, and their optimizer."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(200, 33), nn.Tanh(), nn.Linear(33, 160), nn.Tanh(), nn.Linear(160, 31)).bfloat16()
    if engine == "fsdp2":
        for layer in model:
            fully_shard(layer, mesh=mesh())
        model = fully_shard(model, mesh=mesh())
    elif engine == "ddp":
        model = ddp(model)
    return model, RULES[rule](model.parameters(), lr=1e-2, seed=seed, **settings, **STORAGES[storage])


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        batch = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def codes_follow_the_whole_tensor(storage: str, rule: str, where: str) -> None:
    whole, of_whole = build("ddp", storage, rule)
    train(whole, of_whole, range(3))
    for engine in ("ddp", "process_group"):
        model, optimizer = build(engine, storage, rule)
        release_gradients(model, optimizer)
        train(model, optimizer, range(3))
        assert_bitwise(everything(model, optimizer), everything(whole, of_whole), f"{engine} against DDP without release")
    model, optimizer = build("fsdp2", storage, rule)
    release_gradients(model, optimizer)
    train(model, optimizer, range(3))
    assert_bitwise(everything(model, optimizer), everything(whole, of_whole), "FSDP2 against DDP")
    assert_ranks_equal(parameters_of(model), "FSDP2")

    save(model, optimizer, f"{where}/dcp")
    export_state(f"{where}/portable", optimizer, model, parameters=True)
    expected = everything(model, optimizer)
    train(model, optimizer, range(3, 5))
    for kind in ("dcp", "portable"):
        again, fresh = build("fsdp2", storage, rule, seed=1)
        release_gradients(again, fresh)
        if kind == "dcp":
            load(again, fresh, f"{where}/dcp")
        else:
            import_state(f"{where}/portable", fresh, again, parameters=True)
        assert_bitwise(everything(again, fresh), expected, kind)
        train(again, fresh, range(3, 5))
        assert_bitwise(everything(again, fresh), everything(model, optimizer), f"{kind}, going on")
    columns = nn.Parameter(distribute_tensor(torch.ones(64, 256, dtype=torch.bfloat16), mesh(), [Shard(1)]))
    with pytest.raises(RefusedError, match=r"state_dtype='8bit'.* shape \(64, 256\) .*along the first dimension only"):
        RULES[rule]([columns], state_dtype="8bit")


ROWS = [(storage, rule) for rule in RULES for storage in STORAGES]


@pytest.mark.parametrize(("storage", "rule"), rows(ROWS, lambda row: "adamw" in row or "smallest" in row))
def test_shards_of_rows_have_the_codes_of_the_whole_tensor(ranks: Ranks, tmp_path: Path, storage: str, rule: str) -> None:
    """Of Muon, too, which gathers each matrix and whose momentum is coded by rows."""
    ranks.run(codes_follow_the_whole_tensor, storage, rule, str(tmp_path))
    single, alone = build("single", storage, rule, seed=1)
    load(single, alone, str(tmp_path / "dcp"))
    found = everything(single, alone)
    import_state(tmp_path / "portable", alone, single, parameters=True)
    assert_bitwise(found, everything(single, alone), "two ranks to one, by both files")


def micro_batches_in_the_momentum() -> None:
    """Of Muon without Nesterov, matrix by matrix, and of AdamW's moments."""
    found = {}
    for engine in ("process_group", "fsdp2", "ddp"):
        model, optimizer = build(engine, "smallest", "muon", nesterov=False)
        release_gradients(model, optimizer, accumulation="state")
        for step in range(2):
            for micro in range(2):
                batch = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + 2 * micro + dist.get_rank()))
                (model(batch.bfloat16()).float().square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[engine] = everything(model, optimizer)
    for engine in ("fsdp2", "ddp"):
        assert_bitwise(found[engine], found["process_group"], f"{engine} against a process group")


def test_micro_batches_enter_the_coded_momentum_of_shards_as_that_of_the_whole(ranks: Ranks) -> None:
    ranks.run(micro_batches_in_the_momentum)
