"""Launches in a CUDA graph, and step counts on the device: each replay reads again what changes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.torch_models import ADAM_FAMILY, backend_of, bits, slot_of
from tests.support.triton_launches import watched
from tests.support.triton_tensors import give_gradients, group

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW
from penstock.torch_frontend.backends.triton import devices
from penstock.torch_frontend.backends.triton.configuration import TABLE
from penstock.torch_frontend.backends.triton.launch import Program


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch):
    """As if launches were being captured in a graph, or not."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(devices, "capturing", lambda device: on)

    return switch


def test_a_step_can_be_captured_again_and_again_after_one_without(capture) -> None:
    """Two launches of equally many tensors, gradients at new addresses, and two captures on end."""
    parameters = group((30, 40)) + group((30, 40), torch.bfloat16)
    others = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer, other = (StableAdamW(given, backend="triton", capturable=True) for given in (parameters, others))
    for seed, captured in enumerate((False, True, True, False, True)):
        for given in (parameters, others):
            give_gradients(given, seed)
        capture(captured)
        optimizer.step()
        capture(False)
        other.step()
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(parameters, others, strict=True))


@pytest.mark.parametrize("optimizer_class", ADAM_FAMILY)
def test_numbers_of_updates_on_the_device_are_read_again_at_each_replay(optimizer_class) -> None:
    """Each tensor has its own; c1 and c2 are those that the launch of one tensor computes, with one launch more for all."""
    alone, together = group((3,) * 31 + (200, 2)), group((3,) * 31 + (200, 2))
    one, other = (
        optimizer_class(ps, lr=1e-2, betas=(0.5, 0.75), capturable=True, backend="triton") for ps in (alone, together)
    )
    for parameters in (alone, together):
        give_gradients(parameters)
    for p, q in zip(alone, together, strict=True):
        for optimizer, tensor in ((one, p), (other, q)):
            slot_of(optimizer, tensor).step.fill_(3 * (p.numel() > 2) + (p is alone[0]))
    recorded: list[Any] = []
    launch = Program.__call__
    with mock.patch.object(Program, "__call__", lambda *made: recorded.append(made) or launch(*made)), torch.no_grad():
        backend_of(other).update_all([(slot_of(other, q), q.grad) for q in together])
    assert [program.kernel.__name__ for program, *_ in recorded] == ["store_bias_corrections", "update_group"]
    for replay in (False, True):
        for p, q in zip(alone, together, strict=True):
            with torch.no_grad():
                backend_of(one).update(slot_of(one, p), p.grad, first=True)
            if replay:
                slot_of(other, q).step.add_(1)
            slot_of(one, p).step.add_(1)
        if replay:
            for made in recorded:
                launch(*made)
        assert all(torch.equal(bits(p), bits(q)) for p, q in zip(alone, together, strict=True))


def test_a_pair_of_launches_has_one_launch_of_bias_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setitem(TABLE, ("cpu", None), dataclasses.replace(TABLE["cpu", None], tickets=False))
    for on_nonfinite in ("propagate", "skip"):
        parameters = group((300, 3))
        optimizer = StableAdamW(parameters, backend="triton", capturable=True, on_nonfinite=on_nonfinite)
        give_gradients(parameters)
        with watched(launched.append):
            optimizer.step()
        assert launched == ["store_bias_corrections", "update_group", "update_group"]
        launched.clear()


def test_a_captured_step_takes_its_constants_from_the_step_before(capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every replay would fill and stack eight numbers. In float64, whose numbers are on the device in any case."""
    parameters = group((30, 40), torch.float64)
    optimizer = StableAdamW(parameters, backend="triton", capturable=True)
    give_gradients(parameters)
    optimizer.step()
    monkeypatch.setattr(torch, "full", None)
    capture(True)
    optimizer.step()


def test_a_capture_that_cannot_be_right_is_refused_with_the_remedy(capture) -> None:
    table, frozen = r"step\(\) outside of the capture first", "capturable=True"
    for capturable, sizes, remedy in ((True, (30, 4), table), (False, (30, 4), frozen), (False, (30,), frozen)):
        parameters = group(sizes)
        optimizer = AdamW(parameters, backend="triton", capturable=capturable)
        give_gradients(parameters)
        before = parameters[0].detach().clone()
        capture(True)
        with pytest.raises(RefusedError, match=remedy):
            optimizer.step()
        capture(False)
        assert torch.equal(parameters[0], before)
