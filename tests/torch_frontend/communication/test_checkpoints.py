"""torch.distributed.checkpoint: saved and loaded, into fresh optimizers, and to another number of ranks."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.rank_models import (
    LR,
    THREE,
    Net,
    assert_bitwise,
    data,
    everything,
    parameters_of,
    sharded,
    train,
    wrapped,
)
from tests.support.ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from penstock.core.errors import InvalidArgumentError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients

pytestmark = [
    pytest.mark.xdist_group("distributed"),
    # torch's own, when it saves and loads in one process
    pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning"),
]


def build(engine: str, dtype: torch.dtype, seed: int = 0, rule: type = AdamW, compensation: str = "auto"):
    net = Net(dtype, seed=seed)
    model = net if engine == "single" else wrapped(net, engine)
    optimizer = rule(model.parameters(), **LR, compensation=compensation, seed=seed)
    return model, optimizer


def save(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=where)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def kind_of(value: Any) -> Any:
    """The dtype and class of a tensor; a random key itself."""
    return (value.dtype, type(value)) if isinstance(value, torch.Tensor) else value


def resumes(engine: str, dtype: torch.dtype, compensation: str, where: str) -> None:
    """Into a model of other values and a fresh optimizer, released already: goes on bit for bit."""
    model, optimizer = build(engine, dtype, compensation=compensation)
    release_gradients(model, optimizer)
    train(model, optimizer, range(4))
    save(model, optimizer, where)
    train(model, optimizer, range(4, 8))
    again, fresh = build(engine, dtype, seed=1, compensation=compensation)
    release_gradients(again, fresh)
    before = parameters_of(again)
    get_optimizer_state_dict(again, fresh)  # makes state, and must not train
    assert_bitwise(parameters_of(again), before, "a look at a fresh optimizer")
    load(again, fresh, where)
    train(again, fresh, range(4, 8))
    assert_bitwise(everything(again, fresh), everything(model, optimizer), engine)
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert kind_of(fresh.state[other][key]) == kind_of(value), key


CODINGS = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "stochastic")]


@pytest.mark.parametrize("engine", THREE)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_training_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, engine: str, coding: tuple[torch.dtype, str]) -> None:
    ranks.run(resumes, engine, *coding, str(tmp_path))


def saves(engine: str, where: str) -> list[list[float]]:
    model, optimizer = build(engine, torch.float32, rule=StableAdamW)
    release_gradients(model, optimizer)
    train(model, optimizer, range(4))
    save(model, optimizer, where)
    return [tensor.flatten().tolist() for tensor in everything(model, optimizer)]


@pytest.mark.parametrize("engine", ["process_group", "fsdp2"])
def test_a_checkpoint_of_two_ranks_loads_into_one(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    saved = ranks.run(saves, engine, str(tmp_path))[0]
    model, optimizer = build("single", torch.float32, seed=1, rule=StableAdamW)
    release_gradients(model, optimizer)
    load(model, optimizer, str(tmp_path))
    assert [tensor.flatten().tolist() for tensor in everything(model, optimizer)] == saved


def loads(engine: str, where: str) -> list[list[float]]:
    model, optimizer = build(engine, torch.float32, seed=1, rule=StableAdamW)
    release_gradients(model, optimizer)
    load(model, optimizer, where)
    return [tensor.flatten().tolist() for tensor in everything(model, optimizer)]


@pytest.mark.parametrize("engine", ["process_group", "fsdp2"])
def test_a_checkpoint_of_one_rank_loads_into_two(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    model, optimizer = build("single", torch.float32, rule=StableAdamW)
    for step in range(4):
        model(data(step, 0)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, optimizer, str(tmp_path))
    expected = [tensor.flatten().tolist() for tensor in everything(model, optimizer)]
    assert ranks.run(loads, engine, str(tmp_path)) == [expected] * 2


def full_state(dtype: torch.dtype, compensation: str, broadcast: bool) -> None:
    """Everything on the first rank, and back. No backend sends int16, the compensation of bfloat16: it goes as int32."""
    model, optimizer = build("fsdp2", dtype, compensation=compensation)
    release_gradients(model, optimizer)
    train(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)  # offloaded: on the first rank only
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert state["state"]["first.weight"]["debiased_exp_avg"].shape == (7, 6)
        if (dtype, compensation) == (torch.bfloat16, "auto"):
            assert state["state"]["first.weight"]["compensation"].any()
    again, fresh = build("fsdp2", dtype, seed=1, compensation=compensation)
    set_model_state_dict(again, get_model_state_dict(model))
    back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_optimizer_state_dict(again, fresh, state, options=back)
    assert_bitwise(everything(again, fresh), everything(model, optimizer), "full state")
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert kind_of(fresh.state[other][key]) == kind_of(value), key


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_full_state_dict_makes_a_round_trip(ranks: Ranks, coding: tuple[torch.dtype, str], broadcast: bool) -> None:
    ranks.run(full_state, *coding, broadcast)


def full_state_of_two_ranks() -> dict:
    model, optimizer = build("fsdp2", torch.bfloat16)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    kept = {name: entry["compensation"].tolist() for name, entry in state["state"].items()}
    single, alone = build("single", torch.bfloat16)
    set_optimizer_state_dict(single, alone, state)
    loaded = {name: alone.state[p]["compensation"] for name, p in single.named_parameters()}
    assert all(value.dtype is torch.int16 for value in loaded.values())
    assert {name: value.tolist() for name, value in loaded.items()} == kept
    return kept


def test_a_full_state_dict_goes_to_one_process(ranks: Ranks) -> None:
    assert any(any(map(bool, value)) for value in ranks.run(full_state_of_two_ranks)[0].values())


def copied_and_pickled(dtype: torch.dtype) -> None:
    """What state_dict() gives of shards is made of ordinary DTensors."""
    model, optimizer = build("fsdp2", dtype)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert {type(value) for value in state["state"][0].values()} == {torch.Tensor, DTensor}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copied in (copy.deepcopy(state), torch.load(file, weights_only=False)):
        again, fresh = build("fsdp2", dtype)
        set_model_state_dict(again, get_model_state_dict(model))
        fresh.load_state_dict(copied)
        assert_bitwise(everything(again, fresh), everything(model, optimizer), "a copy")
        assert all(fresh.state[p]["compensation"].dtype is torch.int16 for p in again.parameters() if dtype is torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_of_shards_is_copied_and_pickled(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(copied_and_pickled, dtype)


def whole_into_shards() -> None:
    single = Net()
    optimizer = AdamW(single.parameters(), **LR)
    train(single, optimizer, range(1))
    parts = sharded(Net())
    other = AdamW(parts.parameters(), **LR)
    with pytest.raises(InvalidArgumentError, match="set_optimizer_state_dict"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_whole_tensors_are_not_loaded_into_shards(ranks: Ranks) -> None:
    ranks.run(whole_into_shards)
