"""Blocks whose parameters lie elsewhere while they are not needed: the same bits, or a refusal.

A CPU has no other device to swap with. The storage of a parameter is another one after each move here, and what was in the
former one is gone; what a device adds (markers and states that are on another one) is tested by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.rows import covering
from tests.support.torch_models import (
    OPTIMIZERS,
    batches,
    layers,
    leave_markers_on,
    loss_of,
    same_parameters,
    snapshot,
    unchanged,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, release_gradients
from penstock.torch_frontend.backends import eager


def move(module: nn.Module) -> None:
    for parameter in module.parameters():
        former = parameter.data
        parameter.data = former.clone()
        former.fill_(float("nan"))


def forward(model: nn.Module, x: Tensor, *, swaps: bool, reentrant: bool) -> Tensor:
    """Each block is recomputed in backward, as block swapping needs it: in for its forward, out, in, and out after backward."""
    for block in model:
        given = x
        if swaps:
            move(block)
        x = checkpoint(block, given, use_reentrant=reentrant)
        if swaps:
            move(block)
            x.register_hook(lambda gradient, block=block: move(block))
            given.register_hook(lambda gradient, block=block: move(block))
    return x


def fuse(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(lambda p, group=group: optimizer.step_parameter(p, group))


KINDS = ["plain", "fused", {}, {"max_norm": 0.1}, {"accumulation": "hold"}]


@pytest.mark.parametrize(
    ("optimizer_class", "dtype", "kind", "reentrant"),
    covering(OPTIMIZERS, [torch.float32, torch.bfloat16], KINDS, [False, True]),
)
def test_swapped_blocks_train_the_same_model_bitwise(optimizer_class, dtype, kind, reentrant, monkeypatch) -> None:
    monkeypatch.setattr(eager, "PIECE", 16)
    found = []
    for swaps in (False, True):
        model = layers(dtype=dtype)
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, **kind) if isinstance(kind, dict) else None
        if kind == "fused":
            fuse(optimizer)
        for batch in batches(3, dtype=dtype):
            loss = forward(model, batch.requires_grad_(), swaps=swaps, reentrant=reentrant).float().pow(2).mean()
            (loss if release is None else release.guard(loss)).backward()
            for _ in range(swaps):
                move(model)
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert unchanged(*found)


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.1}], ids=str)
def test_a_marker_goes_to_the_device_of_its_parameter(arguments: dict[str, Any]) -> None:
    """A block that was elsewhere when its marker was made."""
    found = []
    for elsewhere in (False, True):
        model = layers()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        release = release_gradients(model, optimizer, **arguments)
        for batch in batches(3):
            loss = release.guard(loss_of(model, batch))
            if elsewhere:
                leave_markers_on(release, "meta")
            loss.backward()
            assert all(p.grad.device == p.device for p in model.parameters())
            assert torch.isclose(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), release.last_norm.float())
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        found.append(model)
    assert same_parameters(*found)


@pytest.mark.parametrize("released", [False, True])
def test_a_state_on_another_device_is_refused_before_anything_changes(released: bool) -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    for p, state in optimizer.state.items():  # as load_state_dict() leaves it for a block that is elsewhere
        optimizer.state[p] = {key: value if key == "step" else value.to("meta") for key, value in state.items()}
    if released:
        release_gradients(model, optimizer)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RefusedError, match=r"is on meta, and the parameter on cpu.*load_state_dict"):
        (loss_of(model, batches(1)[0]).backward(), optimizer.step())
    assert all(map(torch.equal, before, model.parameters()))
