"""Stochastically rounded parameters: their random bits follow the tensor, wherever and however it is updated."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.support.torch_models import (
    OPTIMIZERS,
    batches,
    bits,
    compiling_small_tensors,
    layers,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core import random_bits
from penstock.core.errors import InvalidArgumentError
from penstock.torch_frontend import Adam, AdamW, Lion, StableAdamW, release_gradients
from penstock.torch_frontend.backends import eager
from penstock.torch_frontend.backends.random_words import Randomness

DTYPE = torch.bfloat16


def stochastic(parameters: Any, optimizer_class: Any = AdamW, **arguments: Any) -> Any:
    return optimizer_class(parameters, **{"lr": 1e-3, "compensation": "stochastic", "backend": "eager", **arguments})


def trained(start: Tensor, optimizer_class: Any = AdamW, *, steps: int = 3, **arguments: Any) -> Tensor:
    """One parameter after a few steps; the numbers of its gradients follow its shape, and their memory its layout."""
    parameter = nn.Parameter(start.clone())
    optimizer = stochastic([parameter], optimizer_class, **arguments)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.empty_like(start).copy_(torch.randn(start.shape, generator=generator))
        optimizer.step()
    return parameter.detach()


def start_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DTYPE)


@pytest.mark.parametrize("optimizer_class", [AdamW, Adam, Lion])
def test_a_tensor_in_pieces_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, optimizer_class: Any) -> None:
    start = start_of(31, 7, 5)
    expected = trained(start, optimizer_class)
    monkeypatch.setattr(eager, "most_elements", lambda _: 64)  # 2 rows of 35 elements, or 64 elements in memory order
    assert torch.equal(bits(trained(start, optimizer_class)), bits(expected))


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_every_memory_layout_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, backend: str, pieces: bool) -> None:
    start = start_of(6, 4, 3, 5)
    expected = trained(start)
    if pieces:
        monkeypatch.setattr(eager, "most_elements", lambda _: 64)
    layouts = [start.to(memory_format=torch.channels_last), start.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)]
    with compiling_small_tensors():
        for layout in layouts:
            assert layout.stride() != start.stride()
            assert torch.equal(layout, start)
            assert torch.equal(bits(trained(layout, backend=backend)), bits(expected))


@pytest.mark.parametrize("on_device", [False, True])
def test_parts_at_any_index_have_the_bits_of_each_element(on_device: bool) -> None:
    """Also a part with elements on both sides of 2^32, or of a multiple of 2^16."""
    key, when = random_bits.tensor_key(0, "w"), random_bits.when(7)
    place: Any = random_bits.place(torch.tensor(key) if on_device else key, when)
    for first, count in ((0, 70_000), (2**16 - 3, 2**17 + 9), (2**32 - 64, 128), (2**40 + 5, 3)):
        of = Randomness(place, first, count, torch.device("cpu"))
        expected = random_bits.bits_at(place, torch.arange(first, first + count))
        assert torch.equal(of.words(torch.empty(count), first), expected.to(torch.int32))
        middle = count // 2
        assert torch.equal(of.words(torch.empty(count - middle), first + middle), expected[middle:].to(torch.int32))


def test_small_steps_are_right_in_the_mean_and_lost_without() -> None:
    """A thousandth of a spacing in every step: 4096 elements, of which one in a thousand moves."""
    start = torch.ones(4096, dtype=DTYPE) * 1.5
    lr, steps = 2.0**-7 / 1000, 100
    moved = {}
    for compensation in ("stochastic", "none"):
        parameter = nn.Parameter(start.clone())
        optimizer = Lion([parameter], lr=lr, compensation=compensation, weight_decay=0.0)
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[compensation] = (start - parameter.detach()).float().mean().item() / (steps * lr)
    assert moved["none"] == 0
    assert abs(moved["stochastic"] - 1) < 4 * (1000 / (4096 * steps)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_released_equals_plain_and_resumed_equals_uninterrupted_bitwise(optimizer_class: Any, dtype: torch.dtype) -> None:
    given = batches(6, dtype=dtype)
    plain, released, resumed = (layers(dtype=dtype) for _ in range(3))
    train(plain, stochastic(plain.parameters(), optimizer_class), given)
    optimizer = stochastic(released.parameters(), optimizer_class)
    with release_gradients(released, optimizer) as release:
        train(released, optimizer, given)
        release.verify(lambda: released(given[0]).float().pow(2).mean())
    assert same_parameters(plain, released)

    first = stochastic(resumed.parameters(), optimizer_class)
    train(resumed, first, given[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = stochastic(resumed.parameters(), optimizer_class, seed=5)  # the file has a seed, and keys
    second.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, second, given[3:])
    assert same_parameters(plain, resumed)
    assert second.param_groups[0]["seed"] == 0


def test_seeds_differ_and_tensors_too() -> None:
    start = start_of(64, 64)
    assert torch.equal(trained(start), trained(start, seed=0))
    assert not torch.equal(trained(start), trained(start, seed=1))
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizer = stochastic(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(*parameters)
    assert len({optimizer.state[parameter]["random_key"] for parameter in parameters}) == 2


def test_a_tensor_keeps_its_bits_when_groups_change_or_are_copied() -> None:
    given = batches(4, dtype=DTYPE)
    models = [layers(dtype=DTYPE) for _ in range(3)]
    optimizers = [stochastic(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, given[:2])
    reordered = optimizers[1].param_groups[0]["params"]
    reordered.reverse()
    optimizers[1].add_param_group({"params": [nn.Parameter(start_of(3))]})
    models[2], optimizers[2] = copy.deepcopy((models[2], optimizers[2]))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, given[2:])
    assert same_parameters(models[0], models[1])
    assert same_parameters(models[0], models[2])


def test_names_decide_in_any_order() -> None:
    given, (one, other) = batches(2, dtype=DTYPE), (layers(dtype=DTYPE), layers(dtype=DTYPE))
    train(one, stochastic(one.named_parameters()), given)
    train(other, stochastic(reversed(list(other.named_parameters()))), given)
    assert same_parameters(one, other)


def test_a_captured_step_has_the_bits_of_an_ordinary_one() -> None:
    start = start_of(40, 50)
    expected = trained(start)
    assert torch.equal(trained(start, capturable=True), expected)
    with compiling_small_tensors():
        assert torch.equal(trained(start, capturable=True, backend="compiled"), expected)


def test_nothing_is_kept_beside_the_parameter() -> None:
    kept = {}
    for compensation in ("none", "stochastic"):
        model = layers(dtype=DTYPE)
        optimizer = stochastic(model.parameters(), compensation=compensation)
        train(model, optimizer, batches(1, dtype=DTYPE))
        tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        kept[compensation] = sum(x.nbytes for x in tensors), {key for state in optimizer.state.values() for key in state}
    assert kept["none"][0] == kept["stochastic"][0]
    assert kept["stochastic"][1] - kept["none"][1] == {"random_key"}  # and who does not ask for it has none


def test_random_bits_take_no_more_memory_than_a_piece_on_an_accelerator() -> None:
    """Where a piece has 2^24 elements otherwise, for few launches. The meta device stands for one."""
    largest: dict[torch.dtype, int] = {}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest[made.dtype] = max(largest.get(made.dtype, 0), made.numel())
            return made

    parameter = nn.Parameter(torch.zeros(5, 2**20, dtype=DTYPE, device="meta"))
    optimizer = stochastic([parameter], Lion)
    parameter.grad = torch.zeros_like(parameter)
    with Sizes():
        optimizer.step()
    assert largest[torch.int32] == largest[torch.float32] == 2**21
    assert largest[torch.int64] == 2**16


def test_float32_parameters_are_rounded_to_nearest_as_ever() -> None:
    start = start_of(30, 30).float()
    assert torch.equal(trained(start), trained(start, compensation="none"))


def test_a_skipped_or_refused_step_uses_no_bits() -> None:
    given, models = batches(3, dtype=DTYPE), [layers(dtype=DTYPE) for _ in range(2)]
    for model, with_nan in zip(models, (False, True), strict=True):
        optimizer = stochastic(model.parameters(), StableAdamW, on_nonfinite="skip")
        for batch in given:
            if with_nan:
                before = snapshot(model, optimizer)
                train(model, optimizer, [batch * float("nan")])
                assert unchanged(before, snapshot(model, optimizer))
            train(model, optimizer, [batch])
    assert same_parameters(*models)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_a_seed_out_of_range_is_refused_and_changes_nothing(seed: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"seed=.* must be an int in \[0, 2\*\*32\)"):
        stochastic([nn.Parameter(start_of(3))], seed=seed)
    optimizer = stochastic([nn.Parameter(start_of(3))])
    with pytest.raises(InvalidArgumentError, match=r"seed="):
        optimizer.add_param_group({"params": [nn.Parameter(start_of(3))], "seed": seed})
    assert len(optimizer.param_groups) == 1
