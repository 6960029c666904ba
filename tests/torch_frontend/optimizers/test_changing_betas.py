"""Betas that change from step to step give torch.optim's numbers, in every mode; constant ones cost nothing."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.torch_models import (
    batches,
    compiling_small_tensors,
    layers,
    loss_of,
    plain_and_released,
    same_parameters,
    snapshot,
    train,
    unchanged,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.torch_frontend import (
    Adam,
    AdamW,
    StableAdamW,
    export_state,
    import_state,
    prepare_for_gradient_release,
    release_gradients,
)
from penstock.torch_frontend.changing_betas import follow_betas

STEPS = 39
LR = 1e-2
PAIRS = [(torch.optim.AdamW, AdamW), (torch.optim.Adam, Adam)]

Schedule = Callable[[torch.optim.Optimizer], Callable[[], Any]]


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS + 1).step


def cyclic(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return CyclicLR(optimizer, LR / 10, LR, step_size_up=4, cycle_momentum=True, base_momentum=0.5, max_momentum=0.99).step


def both(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Both betas, and zeros among them; every third step leaves them alone."""
    given = iter([(0.8, 0.9), (0.0, 0.9), (0.0, 0.0), (0.9, 0.99), (0.5, 0.999)] * 4)

    def change(number: list[int] = [0]) -> None:  # noqa: B006
        number[0] += 1
        if number[0] % 3:
            optimizer.param_groups[0]["betas"] = next(given, (0.9, 0.99))

    return change


SCHEDULES = {"one cycle": one_cycle, "cyclic": cyclic, "both betas": both}


def gradients(dtype: torch.dtype) -> Iterator[list[Tensor | None]]:
    """Of two parameters; the second has none in every fourth step, and so a number of updates of its own."""
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        one, two = (torch.randn(7, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        yield [one, two if number % 4 else None]


def trajectory(make: Callable[..., Any], dtype: torch.dtype, schedule: Schedule, **arguments: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(7, generator=generator, dtype=torch.float64).to(dtype)) for _ in range(2)]
    optimizer = make(parameters, lr=LR, weight_decay=0.0, **arguments)
    advance = schedule(optimizer)
    for given in gradients(dtype):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient
        optimizer.step()
        advance()
    return [parameter.detach() for parameter in parameters]


def allowed(dtype: torch.dtype, parameters: list[Tensor]) -> float:
    """How far two correct runs may be apart.

    Step n moves by lr*u, where |u| <= 8 here. m and v lose at most 16 roundings in each step (the new beta's ratio 5, the
    correction 5, the update 6) of their own magnitude, and a weighted mean of numbers has no larger error than the worst of
    them: u is off by 2*16*n roundings, on either side. The sum of n up to N is N(N+1)/2; each sum p - lr*u rounds once.
    """
    unit = torch.finfo(dtype).eps / 2
    largest = max(float(p.abs().max()) for p in parameters) + STEPS * LR
    return 2 * unit * (LR * 8 * 2 * 16 * STEPS * (STEPS + 1) / 2 + STEPS * largest)


@pytest.mark.parametrize("arguments", [{"backend": "eager"}, {"backend": "eager", "capturable": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_changing_betas_give_the_numbers_of_torch_optim(theirs, ours, schedule, dtype, arguments) -> None:
    expected = trajectory(theirs, dtype, schedule)
    found = trajectory(ours, dtype, schedule, **arguments)
    bound = allowed(dtype, expected)
    for one, other in zip(expected, found, strict=True):
        assert (one - other).abs().max() <= bound


def test_changing_betas_give_the_numbers_of_torch_optim_compiled() -> None:
    expected = trajectory(torch.optim.AdamW, torch.float32, one_cycle)
    with compiling_small_tensors():
        found = trajectory(AdamW, torch.float32, one_cycle, backend="compiled")
    for one, other in zip(expected, found, strict=True):
        assert (one - other).abs().max() <= allowed(torch.float32, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", [StableAdamW, Adam])
@pytest.mark.parametrize("arguments", [{}, {"accumulation": "hold"}, {"max_norm": 1e6}], ids=str)
def test_released_equals_plain_bitwise_under_changing_betas(arguments, optimizer_class, dtype) -> None:
    """1e6 clips nothing: guard() goes the way of clipping, with a factor of 1."""

    def loop(model: nn.Module, optimizer: Any, guard: Callable[[Tensor], Tensor]) -> None:
        train(model, optimizer, batches(12, dtype=dtype), after_step=cyclic(optimizer), loss=guard)

    make = functools.partial(layers, dtype=dtype)
    assert same_parameters(*plain_and_released(loop, optimizer_class, make, **arguments))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("optimizer_class", [AdamW, StableAdamW])
def test_training_resumes_bitwise_between_a_change_of_betas_and_the_next_step(optimizer_class, released: bool) -> None:
    def build() -> tuple[nn.Module, Any, LRScheduler]:
        model = layers(dtype=torch.bfloat16)
        optimizer = optimizer_class(model.parameters(), lr=LR)
        if released:
            release_gradients(model, optimizer)
        return model, optimizer, OneCycleLR(optimizer, max_lr=LR, total_steps=20)

    given = batches(12, dtype=torch.bfloat16)
    model, optimizer, scheduler = build()
    train(model, optimizer, given[:5], after_step=scheduler.step)
    saved = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, scheduler)], saved)
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["betas_of_moments"] == optimizer.param_groups[0]["betas_of_moments"]
    train(model, optimizer, given[5:], after_step=scheduler.step)
    saved.seek(0)
    resumed = build()
    for part, state in zip(resumed, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert resumed[1].param_groups[0]["betas_of_moments"] != resumed[1].param_groups[0]["betas"]
    train(*resumed[:2], given[5:], after_step=resumed[2].step)
    assert unchanged(snapshot(model, optimizer), snapshot(*resumed[:2]))


def test_a_state_saved_without_the_betas_of_its_moments_is_that_of_its_own_betas() -> None:
    model, given = layers(), batches(6)
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.8, 0.99))
    train(model, optimizer, given[:3])
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["betas_of_moments"]
    again = copy.deepcopy(model)
    other = AdamW(again.parameters(), lr=LR)
    other.load_state_dict(saved)
    for each in (optimizer, other):
        each.param_groups[0]["betas"] = (0.9, 0.95)
    train(model, optimizer, given[3:])
    train(again, other, given[3:])
    assert unchanged(snapshot(model, optimizer), snapshot(again, other))


def test_constant_betas_cost_nothing_and_leave_every_bit() -> None:
    """Neither a schedule of the learning rate, nor a change that is taken back before the next step, touches a moment."""
    models = [layers(), layers()]
    optimizers = [StableAdamW(model.parameters(), lr=LR) for model in models]
    for model, optimizer, touched in zip(models, optimizers, (False, True), strict=True):
        advance = OneCycleLR(optimizer, max_lr=LR, total_steps=7, cycle_momentum=False).step
        with mock.patch("penstock.torch_frontend.known_group.follow_betas", side_effect=AssertionError):
            for batch in batches(6):
                group = optimizer.param_groups[0]
                if touched:
                    betas, group["betas"] = group["betas"], (0.5, 0.5)
                    group["betas"] = torch.tensor(betas, dtype=torch.float64).unbind()
                train(model, optimizer, [batch], after_step=advance)
    assert unchanged(*map(snapshot, models, optimizers))


def test_betas_that_are_tensors_on_a_device_are_followed_there_into_the_same_memory() -> None:
    """As `follow_betas` gets them: nothing is read on the host, and a captured CUDA graph finds the betas where they were."""
    models = [layers(dtype=torch.bfloat16), layers(dtype=torch.bfloat16)]
    optimizers = [AdamW(model.parameters(), lr=LR, betas=(0.875, 0.75), capturable=True) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(3, dtype=torch.bfloat16))
    changed: list[tuple[Any, Any]] = [(0.5, 0.9375), tuple(torch.tensor([0.5, 0.9375], dtype=torch.float64))]
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    groups[1]["betas_of_moments"] = kept = tuple(torch.tensor(groups[0]["betas_of_moments"]))
    for group, betas, optimizer in zip(groups, changed, optimizers, strict=True):
        follow_betas(group, betas, optimizer.state)
    assert unchanged(*map(snapshot, models, optimizers))
    assert all(one is other for one, other in zip(kept, groups[1]["betas_of_moments"], strict=True))
    assert [float(beta) for beta in kept] == [0.5, 0.9375]


@pytest.mark.parametrize("strict", [True, False])
def test_betas_that_change_between_micro_batches_of_an_update_are_refused_before_any_change(strict: bool) -> None:
    def build() -> tuple[nn.Module, Any, Callable[[bool], None]]:
        model = layers()
        optimizer = AdamW(model.parameters(), lr=LR, gradient_release=not strict)
        if strict:
            release = release_gradients(model, optimizer, accumulation="state")
            return model, optimizer, lambda last: setattr(release, "last_microbatch", last)
        prepare_for_gradient_release(model, optimizer)
        return model, optimizer, lambda last: setattr(optimizer, "optimizer_accumulation", not last)

    one, two = batches(2)
    runs = [build(), build()]
    for disturbed, (model, optimizer, is_last) in enumerate(runs):
        for update in range(2):
            optimizer.param_groups[0]["betas"] = ((0.9, 0.99), (0.7, 0.9))[update]
            is_last(False)
            loss_of(model, one).backward()
            if disturbed:
                betas, optimizer.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"], (0.5, 0.5)
                before = snapshot(model, optimizer)
                with pytest.raises(RefusedError, match=r"betas of parameter group 0 changed between the micro-batches"):
                    loss_of(model, two).backward()
                assert unchanged(before, snapshot(model, optimizer))
                optimizer.param_groups[0]["betas"] = betas
            is_last(True)
            loss_of(model, two).backward()
            if strict:
                optimizer.step()
                optimizer.zero_grad()
    assert same_parameters(runs[0][0], runs[1][0])


def test_a_change_that_is_out_of_range_leaves_all_groups_alone() -> None:
    model = layers(2)
    optimizer = AdamW([{"params": [p]} for p in model.parameters()], lr=LR)
    train(model, optimizer, batches(3))
    before = snapshot(model, optimizer)
    optimizer.param_groups[0]["betas"], optimizer.param_groups[1]["betas"] = (0.5, 0.5), (0.5, 1.5)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(InvalidArgumentError, match=r"betas\[1\]=1.5"):
        optimizer.step()
    assert unchanged(before, snapshot(model, optimizer))


def test_skipped_steps_and_verify_leave_the_moments_under_their_betas() -> None:
    """A skipped step between two changes, and a `verify` after one, change the numbers by roundings only."""
    results = []
    for disturbed in (False, True):
        model = layers(dtype=torch.float64)
        optimizer = AdamW(model.parameters(), lr=LR, on_nonfinite="skip")
        release = release_gradients(model, optimizer)
        train(model, optimizer, batches(3, dtype=torch.float64))
        group = optimizer.param_groups[0]
        if disturbed:
            group["betas"] = (0.5, 0.9)
            before = snapshot(model, optimizer)
            release.verify(lambda: loss_of(model, batches(1, dtype=torch.float64)[0]))  # noqa: B023
            assert unchanged(before, snapshot(model, optimizer))
            with release.paused():
                (loss_of(model, batches(1, dtype=torch.float64)[0]) * math.nan).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.skipped == 1
        group["betas"] = (0.7, 0.99)
        train(model, optimizer, batches(3, dtype=torch.float64, seed=2))
        results.append(model)
    for p, q in zip(*(model.parameters() for model in results), strict=True):
        assert (p - q).abs().max() <= 1e-13  # of float64, whose rounding is 1e-16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_portable_state_after_a_change_of_betas_continues_the_run_bitwise(dtype: torch.dtype, tmp_path) -> None:
    given = batches(10, dtype=dtype)
    model = layers(dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    train(model, optimizer, given[:5])
    optimizer.param_groups[0]["betas"] = (0.7, 0.9)
    before = snapshot(model, optimizer)
    export_state(tmp_path / "state", optimizer, model, parameters=True)
    assert unchanged(before, snapshot(model, optimizer))
    train(model, optimizer, given[5:])
    for take_betas in (True, False):
        again = layers(dtype=dtype, seed=5)
        other = AdamW(again.parameters(), lr=LR, betas=(0.6, 0.9) if take_betas else (0.7, 0.9))
        import_state(tmp_path / "state", other, again, parameters=True, hyperparameters=take_betas)
        train(again, other, given[5:])
        assert unchanged(snapshot(model, optimizer), snapshot(again, other))


def test_a_second_moment_made_under_a_higher_beta2_goes_on_bitwise_from_a_portable_state(tmp_path) -> None:
    """It is float32, and a new one under the lower beta2 would be bfloat16."""
    given = batches(6, dtype=torch.bfloat16)
    model, again = layers(dtype=torch.bfloat16), layers(dtype=torch.bfloat16, seed=5)
    optimizer, other = (AdamW(each.parameters(), lr=LR, betas=(0.9, 0.999)) for each in (model, again))
    train(model, optimizer, given[:3])
    optimizer.param_groups[0]["betas"] = (0.9, 0.96)
    export_state(tmp_path / "state", optimizer, model, parameters=True)
    import_state(tmp_path / "state", other, again, parameters=True, hyperparameters=True)
    for each, its in ((model, optimizer), (again, other)):
        train(each, its, given[3:])
    assert unchanged(snapshot(model, optimizer), snapshot(again, other))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
@pytest.mark.parametrize("direction", ["to torch", "from torch", "into other betas"])
def test_conversions_after_a_change_of_betas_continue_the_run(direction: str, theirs, ours, tmp_path) -> None:
    """In float64: torch.optim all the way is the truth."""
    given = batches(10, dtype=torch.float64)

    def run(first: Any, then: Any) -> nn.Module:
        model = layers(dtype=torch.float64)
        optimizer = first(model.parameters(), lr=LR, betas=(0.9, 0.95))
        train(model, optimizer, given[:3])
        optimizer.param_groups[0]["betas"] = (0.7, 0.9)
        train(model, optimizer, given[3:5])
        later = (0.8, 0.99)
        if direction != "into other betas":
            optimizer.param_groups[0]["betas"] = later
        if then is first:
            optimizer.param_groups[0]["betas"] = later
        else:
            export_state(tmp_path / "state", optimizer, model)
            optimizer = then(model.parameters(), lr=LR, betas=later)
            import_state(tmp_path / "state", optimizer, model)
        train(model, optimizer, given[5:])
        return model

    truth = run(theirs, theirs)
    found = run(theirs, ours) if direction == "from torch" else run(ours, theirs)
    for p, q in zip(truth.parameters(), found.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-13  # of float64, whose rounding is 1e-16
