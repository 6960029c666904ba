"""What is not asked for is not on the way: counts of calls, hooks and bytes of a released gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.release_overhead.calls import calls_per_gradient
from tests.support.calls import calls_in
from tests.support.torch_models import OPTIMIZERS, batches, layers, loss_of, rule_of, slot_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from penstock.planner.live_storages import OTHER, LiveStorageMeter
from penstock.torch_frontend import AdamW, StableAdamW, microbatch_blocks, release_gradients
from penstock.torch_frontend.backends import eager

CALLS = 30
CALLS_IN_A_DIVIDED_BLOCK = 33
"""With those of microbatch_blocks, which also looks at each node of the block's graph."""


@pytest.mark.parametrize("optimizer_class", [AdamW, StableAdamW])
def test_a_released_gradient_takes_few_calls(optimizer_class) -> None:
    assert calls_per_gradient(optimizer_class) <= CALLS


@pytest.mark.parametrize("optimizer_class", [AdamW, StableAdamW])
def test_a_released_gradient_of_a_divided_block_takes_few_calls_more(optimizer_class) -> None:
    def calls(depth: int) -> int:
        model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))))
        optimizer = optimizer_class(model.parameters())
        with microbatch_blocks(model, chunks=1), release_gradients(model, optimizer):
            for _ in range(3):
                counted = calls_in(lambda: model(torch.ones(2, 4)).sum().backward()).total()
                optimizer.step()
        return counted

    assert (calls(20) - calls(2)) / 36 <= CALLS_IN_A_DIVIDED_BLOCK + 3 * (optimizer_class is StableAdamW)


def calls_of(parameters: int, groups: int, releases: int) -> float:
    """Python calls a gradient of one model, beside other releases."""
    made = []
    for _ in range(releases):
        model = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(parameters)])
        chunks = [{"params": list(model)[start::groups]} for start in range(groups)]
        optimizer = AdamW(chunks)
        made.append((model, optimizer, release_gradients(model, optimizer)))
    model, optimizer, _ = made[0]
    for _ in range(3):
        counted = calls_in(sum(p.sum() for p in model).backward).total()
        optimizer.step()
    return counted / parameters


def test_calls_a_gradient_do_not_grow_with_the_model_its_groups_or_other_releases() -> None:
    few = calls_of(parameters=20, groups=1, releases=1)
    assert calls_of(parameters=200, groups=1, releases=1) <= few
    assert calls_of(parameters=2000, groups=20, releases=1) <= few  # settings are validated once a group and pass
    assert calls_of(parameters=20, groups=1, releases=5) == few


def test_calls_a_gradient_do_not_grow_with_the_number_of_reentrant_checkpoints() -> None:
    def calls(depth: int) -> float:
        model = layers(depth)
        optimizer = AdamW(model.parameters())
        release_gradients(model, optimizer)
        for _ in range(2):
            x = batches(1)[0].requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=True)
            counted = calls_in(x.sum().backward).total()
            optimizer.step()
        return counted / depth

    assert calls(64) <= calls(8)


def test_no_graph_is_walked_where_no_function_runs_a_pass_of_its_own() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    for nested in (False, True):  # in the first backward of a model, too
        x = batches(1)[0].requires_grad_()
        y = model(checkpoint(torch.tanh, x, use_reentrant=True) if nested else x)
        assert bool(calls_in(y.sum().backward)["reachable"]) == nested
        optimizer.step()
        del y


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1.0}, {"accumulation": "hold"}, {"accumulation": "state"}])
def test_one_hook_a_parameter(arguments) -> None:
    model = layers()
    release_gradients(model, AdamW(model.parameters()), **arguments)
    assert all(len(p._post_accumulate_grad_hooks) == 1 and not p._backward_hooks for p in model.parameters())


class LargestAllocation(TorchDispatchMode):
    """The bytes of the largest storage that an operation has made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_no_temporary_is_as_large_as_a_large_tensor(optimizer_class, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(eager, "PIECE", 64)
    piece = 64 * torch.get_num_threads()
    p = nn.Parameter(torch.ones(100 * piece, dtype=dtype))
    optimizer = optimizer_class([p], backend="eager")
    release_gradients(nn.ParameterList([p]), optimizer)
    p.sum().backward()
    optimizer.step()
    loss = p.float().sum()
    gradient = torch.full_like(p, 0.1)
    with LargestAllocation() as made:
        optimizer._update(p, gradient, measure=True)
    assert 0 < made.largest <= 2 * 4 * piece
    del loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_the_temporaries_of_an_update_are_eight_pieces_and_the_scratch(optimizer_class, dtype, monkeypatch) -> None:
    """All at once, in the compute dtype; StableAdamW has eight, with a parameter and a compensation to store.

    A field more than its two has three: as it was, as it becomes, and what enters it. A rule that changes fields after the step
    has one more: as they become then. A bfloat16 parameter has two more of scratch: as it is, and what is added to it.
    """
    monkeypatch.setattr(eager, "PIECE", 256)
    piece = 4 * 256 * torch.get_num_threads()
    p = nn.Parameter(torch.ones(piece, dtype=dtype))
    optimizer = optimizer_class([p], backend="eager")
    p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    kept = [p, p.grad, *optimizer.state[p].values()]
    with LiveStorageMeter({"kept": kept}, at_least=64) as meter:
        optimizer.step()
    rule = rule_of(optimizer)
    more = 3 * max(0, len(rule.fields) - 2) + (rule.after_step is not None)
    more += 2 * (dtype is torch.bfloat16)
    assert 0 < meter.at_peak[OTHER] <= (2 + 8 + more) * piece


@pytest.mark.parametrize("precision", ["compact", "smallest"])
def test_a_coded_update_has_as_many_temporaries(precision, monkeypatch) -> None:
    """The fields, the parameter, four for what is coded, the gradient, the two of every piece, a factor a block; the table."""
    monkeypatch.setattr(eager, "PIECE", 2**10)
    monkeypatch.setattr(eager, "most_elements", lambda _: 2**14)
    piece = 4 * 2**14
    p = nn.Parameter(torch.ones(piece // 64, 128, dtype=torch.bfloat16))
    optimizer = AdamW([p], backend="eager", precision=precision)
    p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    kept = [p, p.grad, *(kept for kept in optimizer.state[p].values() if isinstance(kept, torch.Tensor))]
    with LiveStorageMeter({"kept": kept}, at_least=64) as meter:
        optimizer.step()
    assert 0 < meter.at_peak[OTHER] <= (2 + 1 + 4 + 1 + 2) * piece + piece // 128 + 4 * 2**16


def test_a_step_of_small_tensors_is_one_call_of_each_operation() -> None:
    """However many tensors there are."""
    counts = []
    for count in (4, 40):
        model = layers(count)
        optimizer = AdamW(model.parameters())
        loss_of(model, batches(1)[0]).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        counts.append({e.key: e.count for e in profile.key_averages() if e.key.startswith("aten::_foreach")})
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 5


@pytest.mark.parametrize("arguments", [{}, {"accumulation": "state"}, {"accumulation": "hold"}], ids=str)
def test_between_updates_no_gradient_and_no_moment_in_another_dtype_is_kept(arguments) -> None:
    model = layers(dtype=torch.bfloat16)
    optimizer = StableAdamW(model.parameters(), backend="eager")
    release_gradients(model, optimizer, **arguments)
    loss_of(model, batches(1, dtype=torch.bfloat16)[0]).backward()
    optimizer.step()
    for p in model.parameters():
        piece = slot_of(optimizer, p).plan
        assert (piece.gradient, piece.upcast_gradient, piece.upcast) == (None,) * 3


def test_set_up_for_one_process_reads_no_tensor() -> None:
    """On a device each would be a wait; on meta it raises."""
    model = nn.Linear(2, 2, device="meta")
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, device="meta"), capturable=True)
    assert release_gradients(model, optimizer) is optimizer.release
