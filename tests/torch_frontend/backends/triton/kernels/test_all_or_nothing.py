"""A step of several launches: what is refused, or cannot be made ready, leaves every byte of every tensor; then it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.rows import covering
from tests.support.torch_models import all_parameters, backend_of, bits, gone, slot_of, unchanged, use_backend
from tests.support.triton_launches import watched

from penstock.core.errors import InvalidArgumentError, RefusedError, UnsupportedTensorError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients
from penstock.torch_frontend.backends.backend import EXP_AVG, EXP_AVG_SQ
from penstock.torch_frontend.backends.triton import devices
from penstock.torch_frontend.backends.triton.backend import TritonBackend
from penstock.torch_frontend.backends.triton.memory import Scratch

WAYS = [(StableAdamW, "step"), (AdamW, "step"), (StableAdamW, "skip"), (StableAdamW, "shards")]


def two_groups(rule: type, way: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, Callable[[Any], None]]:
    """Two optimizers alike, each with a group in float32 and one in bfloat16 that differs, and what takes a step."""
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        one = [torch.randn(size, generator=generator).requires_grad_() for size in (130, 3)]
        other = [torch.randn(size, generator=generator).bfloat16().requires_grad_() for size in ((6, 5), (40,))]
        groups = [{"params": one}, {"params": other, "lr": 0.2}]
        capturable = way == "skip"
        optimizer = rule(groups, backend="triton", on_nonfinite="skip" if capturable else "propagate", capturable=capturable)
        made.append(optimizer)

    def step(optimizer: Any) -> None:
        if way == "shards":
            use_backend(optimizer, OverShards(backend_of(optimizer)))
        try:
            optimizer.step()
        finally:
            if way == "shards":
                use_backend(optimizer, backend_of(optimizer).backend)

    return made[0], made[1], step


class OverShards:
    """The backend, as it is asked for parts of tensors that are whole after all."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def update_all(self, pairs: Any, **options: Any) -> None:
        self.backend.update_all(pairs, over_shards=list, **options)


def give_gradients(optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in all_parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * 3


def everything(optimizer: Any) -> list[torch.Tensor]:
    parameters = all_parameters(optimizer)
    return [bits(x).clone() for p in parameters for x in (p, *optimizer.state[p].values())]


def gap_in_memory(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    p = all_parameters(optimizer)[2]
    before = p.data
    wide = torch.zeros(6, 10, dtype=p.dtype)
    wide[:, ::2] = before
    p.data = wide[:, ::2]
    return lambda: setattr(p, "data", before)


def state_elsewhere(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    state = optimizer.state[all_parameters(optimizer)[2]]
    before = state["debiased_exp_avg"]
    state["debiased_exp_avg"] = torch.zeros(6, 5, dtype=before.dtype, device="meta")
    return lambda: state.update(debiased_exp_avg=before)


def learning_rate_out_of_range(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    group = optimizer.param_groups[1]
    group["lr"] = torch.tensor(-1.0)
    return lambda: group.update(lr=0.2)


def no_memory(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """For what the second launch needs beside the tensors."""
    calls: list[int] = []
    original = Scratch.counters

    def counters(scratch: Scratch, count: int) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        return original(scratch, count)

    patch.setattr(Scratch, "counters", counters)
    return lambda: None


REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (gap_in_memory, UnsupportedTensorError, "gaps in memory"),
    (state_elsewhere, UnsupportedTensorError, "on cpu, and its exp_avg on meta"),
    (learning_rate_out_of_range, InvalidArgumentError, "lr=-1"),
    (no_memory, torch.OutOfMemoryError, "planted"),
]


@pytest.mark.parametrize(("rule", "way", "spoil", "error", "said"), covering(WAYS, REFUSALS))
def test_a_second_group_that_is_refused_leaves_the_first(
    rule: type, way: str, spoil: Any, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, plain, step = two_groups(rule, way)
    for given in (optimizer, plain):
        give_gradients(given, 0)
        step(given)
        give_gradients(given, 1)
    before = everything(optimizer)
    with monkeypatch.context() as patch:
        repair = spoil(optimizer, patch)
        with pytest.raises(error, match=said):
            step(optimizer)
    repair()
    assert unchanged(before, everything(optimizer))
    assert [int(optimizer.state[p]["step"]) for p in all_parameters(optimizer)] == [1] * 4
    for given in (optimizer, plain):
        step(given)
    assert unchanged(everything(plain), everything(optimizer))


class NoCompilerError(Exception):
    """Planted."""


@pytest.mark.parametrize(("rule", "way"), WAYS)
def test_no_launch_is_made_before_the_last_one_is_compiled(rule: type, way: str) -> None:
    optimizer, plain, step = two_groups(rule, way)
    for given in (optimizer, plain):
        give_gradients(given, 0)
    fails_at = 2 if way == "step" else 4
    compiled: list[str] = []

    def compile(name: str) -> None:
        compiled.append(name)
        if len(compiled) == fails_at:
            raise NoCompilerError

    with watched(str, compile):
        with pytest.raises(NoCompilerError):
            step(optimizer)
        assert all(int(optimizer.state[p]["step"]) == 0 for p in all_parameters(optimizer))
        assert not any(optimizer.state[p][name].any() for p in all_parameters(optimizer) for name in (EXP_AVG, EXP_AVG_SQ))
        step(optimizer)
        seen = len(compiled)
        give_gradients(optimizer, 1)
        step(optimizer)
        assert len(compiled) == seen, "compiled again"
    step(plain)
    give_gradients(plain, 1)
    step(plain)
    assert unchanged(everything(plain), everything(optimizer))


def test_a_capture_that_lacks_the_memory_of_the_second_launch_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group had no gradient in the step before."""
    optimizer, plain, _ = two_groups(StableAdamW, "skip")
    optimizer.on_nonfinite = plain.on_nonfinite = "propagate"
    for given in (optimizer, plain):
        give_gradients(given, 0)
        for p in given.param_groups[1]["params"]:
            p.grad = None
        given.step()
        give_gradients(given, 1)
    for parameter in all_parameters(optimizer):
        slot_of(optimizer, parameter)  # with the state that a first step makes
    before = everything(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "capturing", lambda device: True)
        with pytest.raises(RefusedError, match=r"step\(\) outside of the capture first"):
            optimizer.step()
    assert unchanged(before, everything(optimizer))
    for given in (optimizer, plain):
        given.step()
    assert unchanged(everything(plain), everything(optimizer))


def test_small_gradients_that_waited_are_given_back_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under release: two dtypes wait, and the launch of the second cannot be made ready."""

    def model() -> torch.nn.ParameterList:
        generator = torch.Generator().manual_seed(0)
        sizes = ((200, 20), (30,), (40,))
        return torch.nn.ParameterList(
            [torch.randn(size, generator=generator).to(torch.bfloat16 if size == (40,) else torch.float32) for size in sizes]
        )

    models = [model(), model()]
    optimizers = [StableAdamW(one.parameters(), backend="triton") for one in models]
    releases = [release_gradients(one, optimizer) for one, optimizer in zip(models, optimizers, strict=True)]
    failing, _ = optimizers
    loss, other = (sum((p.float() ** 2).sum() for p in one) for one in models)
    with monkeypatch.context() as patch:
        original, calls = TritonBackend._prepare, []

        def ready(*given: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("planted")
            return original(*given, **options)

        patch.setattr(TritonBackend, "_prepare", ready)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            loss.backward()
    assert [not gone([p]) for p in all_parameters(failing)] == [False, True, True]
    assert [int(failing.state[p]["step"]) for p in all_parameters(failing)] == [1, 0, 0]
    other.backward()
    for optimizer, release in zip(optimizers, releases, strict=True):
        optimizer.step()
        assert release.ledger.live == 0
    assert failing.state_dict()["state"].keys() == {0, 1, 2}
    assert unchanged(*(everything(optimizer) for optimizer in optimizers))
