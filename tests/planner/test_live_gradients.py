"""The meter of live gradients sees what is alive, and keeps nothing alive itself."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from penstock.planner.live_gradients import LiveGradientMeter

LAYERS, WIDTH = 16, 32
ONE = WIDTH * WIDTH * 4


def equal_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def backward(model: nn.Module) -> None:
    model(torch.ones(4, WIDTH)).sum().backward()


def test_plain_backward_holds_every_gradient() -> None:
    model = equal_layers()
    with LiveGradientMeter(model.named_parameters()) as meter:
        backward(model)
        assert meter.peak == meter.live() == LAYERS * ONE
        assert [arrival.live_bytes for arrival in meter.timeline] == [(i + 1) * ONE for i in range(LAYERS)]
        assert [arrival.parameter for arrival in meter.timeline] == [f"{i}.weight" for i in reversed(range(LAYERS))]
        model.zero_grad(set_to_none=True)
        assert meter.live() == 0


def test_a_gradient_that_is_freed_in_its_hook_is_seen_to_be_gone() -> None:
    model = equal_layers()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with LiveGradientMeter(model.named_parameters()) as meter:
        backward(model)
    assert meter.peak == ONE
    assert meter.live() == 0


def test_gradients_from_before_count_and_what_is_added_to_them_too() -> None:
    model = equal_layers()
    backward(model)
    with LiveGradientMeter(model.named_parameters()) as meter:
        assert meter.live() == LAYERS * ONE
        backward(model)
        assert meter.peak == (LAYERS + 1) * ONE
        assert meter.live() == LAYERS * ONE


def test_an_alias_that_somebody_keeps_counts_once_and_as_long_as_it_is_kept() -> None:
    model = equal_layers()
    kept: list[Tensor] = []

    def keep_a_piece(parameter: Tensor) -> None:
        assert parameter.grad is not None
        kept.append(parameter.grad.view(-1)[:1])
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(keep_a_piece)
    with LiveGradientMeter(model.named_parameters()) as meter:
        backward(model)
        assert meter.peak == meter.live() == LAYERS * ONE
        del kept[4:]
        assert meter.live() == 4 * ONE


def test_a_tied_parameter_is_one_gradient_and_a_frozen_one_none() -> None:
    model = equal_layers()
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    with LiveGradientMeter(model.named_parameters()) as meter:
        backward(model)
    assert meter.peak == (LAYERS - 2) * ONE


def test_a_new_timeline_keeps_the_peak_and_no_hook_stays() -> None:
    model = equal_layers()
    with LiveGradientMeter(model.named_parameters()) as meter:
        backward(model)
        model.zero_grad()
        meter.start_timeline()
        assert meter.timeline == []
        assert meter.peak == LAYERS * ONE
    backward(model)
    assert meter.timeline == []
    del meter
    gc.collect()


def test_the_meter_counts_no_marker() -> None:
    from penstock.torch_frontend import AdamW, release_gradients

    model = equal_layers()
    optimizer = AdamW(model.parameters(), lr=0.0)
    with LiveGradientMeter(model.named_parameters()) as meter:
        release_gradients(model, optimizer)
        backward(model)
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert meter.live() == 0
        meter.start_timeline()
        assert meter.peak == ONE
